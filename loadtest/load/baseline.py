"""Baselines: ratios of two sides measured in one run, which other machines can be held against.

A file of loadtest/baselines has the command, the machine, and of each ratio its value and which way is better.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

TOLERANCE = 0.1
T = TypeVar("T", bound=BaseModel)


class BaselineError(Exception):
    """A baseline that cannot be used. ``str()`` names the file and the remedy."""


class Ratio(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    value: float = Field(gt=0)
    better: Literal["higher", "lower"]


class Measured(BaseModel):
    """What a result of make bench or make load says of its ratios; the rest of it is not looked at."""

    model_config = ConfigDict(frozen=True)
    what: str
    pairs: int
    ratios: Mapping[str, Ratio]


class Baseline(Measured):
    model_config = ConfigDict(frozen=True, extra="forbid")
    machine: str


def measured(path: Path) -> Measured:
    """Of a result; one without ratios was not made by the comparisons."""
    return _read(path, Measured, "a result of make bench or make load has them")


def read(path: Path) -> Baseline:
    return _read(path, Baseline, "make it again: python loadtest/drive.py baseline RESULT OUT")


def _read(path: Path, kind: type[T], remedy: str) -> T:
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise BaselineError(f"{path}: cannot be read: {e.strerror}; {remedy}") from e
    except ValidationError as e:
        first = e.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise BaselineError(f"{path}: {field}: {first['msg']}; {remedy}") from None


def write(path: Path, what: str, pairs: int, ratios: Mapping[str, Ratio]) -> None:
    rounded = {name: Ratio(value=float(f"{r.value:.4g}"), better=r.better) for name, r in ratios.items()}
    made = Baseline(what=what, machine=machine(), pairs=pairs, ratios=rounded)
    path.write_text(json.dumps(made.model_dump(), indent=1) + "\n", encoding="utf-8")


def machine() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def worse(before: Mapping[str, Ratio], now: Mapping[str, Ratio], tolerance: float = TOLERANCE) -> list[str]:
    """A line for each ratio of before that is worse by more than tolerance (0.1: ten per cent), or was not measured."""
    return [line for name, old in before.items() if (line := _worse(name, old, now.get(name), tolerance))]


def _worse(name: str, old: Ratio, new: Ratio | None, tolerance: float) -> str | None:
    if new is None:
        return f"{name}: was {old.value:.3g}, is not measured any more"
    loss = old.value / new.value if old.better == "higher" else new.value / old.value
    if loss <= 1 + tolerance:
        return None
    return f"{name}: was {old.value:.3g}, is {new.value:.3g} ({old.better} is better): worse by {loss - 1:.0%}"
