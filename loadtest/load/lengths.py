"""How many tokens a prompt or an output has: one class for each kind of distribution."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, model_validator

MOST = 1 << 20
Tokens = Annotated[int, Field(strict=True, ge=1, le=MOST)]


class Part(BaseModel):
    """A table of a scenario: immutable, and without fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Fixed(Part):
    kind: Literal["fixed"]
    tokens: Tokens

    def draw(self, rng: Random) -> int:
        return self.tokens


class Uniform(Part):
    """All whole numbers from low to high, equally often."""

    kind: Literal["uniform"]
    low: Tokens
    high: Tokens

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        if self.low > self.high:
            raise ValueError(f"low is {self.low} and high is {self.high}; exchange them")
        return self

    def draw(self, rng: Random) -> int:
        return rng.randint(self.low, self.high)


class Lognormal(Part):
    """exp of a normal distribution around log(median); what falls outside low to high becomes the nearest of them."""

    kind: Literal["lognormal"]
    median: Tokens
    sigma: float = Field(gt=0, le=4)
    low: Tokens = 1
    high: Tokens

    @model_validator(mode="after")
    def _ordered(self) -> Lognormal:
        if not self.low <= self.median <= self.high:
            raise ValueError(f"median is {self.median}; it must lie between low ({self.low}) and high ({self.high})")
        return self

    def draw(self, rng: Random) -> int:
        return min(self.high, max(self.low, round(rng.lognormvariate(math.log(self.median), self.sigma))))


class Listed(Part):
    """Drawn from a file with one length a line, beside the scenario; # begins a comment."""

    kind: Literal["file"]
    path: str
    _lengths: tuple[int, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _read(self, info: ValidationInfo) -> Listed:
        path = Path((info.context or {}).get("folder", ".")) / self.path
        try:
            lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as e:
            raise ValueError(f"{path} cannot be read ({e}); the path counts from the scenario's folder") from e
        self._lengths = tuple(_length(path, n, line) for n, line in enumerate(lines, 1) if line)
        if not self._lengths:
            raise ValueError(f"{path} has no lengths; write one whole number a line")
        return self

    def draw(self, rng: Random) -> int:
        return rng.choice(self._lengths)


def _length(path: Path, number: int, line: str) -> int:
    if not line.isdecimal() or not 1 <= int(line) <= MOST:
        raise ValueError(f"{path}:{number}: {line!r} is no length; write a whole number, 1 to {MOST}")
    return int(line)


Lengths = Annotated[Fixed | Uniform | Lognormal | Listed, Field(discriminator="kind")]
