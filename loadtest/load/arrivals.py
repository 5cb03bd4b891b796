"""When requests are sent. Open loops have a schedule fixed beforehand; a closed one sends the next when one ends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Annotated, Literal

from pydantic import Field

from .lengths import Part


class Closed(Part):
    """clients, each of which always has one request running."""

    kind: Literal["closed"]
    clients: int = Field(strict=True, ge=1, le=10_000)


class Poisson(Part):
    """rate requests per second, with exponential gaps."""

    kind: Literal["poisson"]
    rate: float = Field(gt=0, le=1e5)

    def due(self, rng: Random) -> Iterator[float]:
        at = 0.0
        while True:
            at += -math.log(1.0 - rng.random()) / self.rate
            yield at


class Burst(Part):
    """size requests at one moment, again every so many seconds."""

    kind: Literal["burst"]
    size: int = Field(strict=True, ge=1, le=10_000)
    every: float = Field(gt=0, le=3600)

    def due(self, rng: Random) -> Iterator[float]:
        number = 0
        while True:
            yield number // self.size * self.every
            number += 1


Arrival = Annotated[Closed | Poisson | Burst, Field(discriminator="kind")]
