"""What a load test asks for, as TOML: the fields below are the format. Errors name file, field and remedy."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from .arrivals import Arrival
from .lengths import Lengths, Part, Tokens

FOLDER = Path(__file__).resolve().parents[1] / "scenarios"
_KINDS = {"closed", "poisson", "burst", "fixed", "uniform", "lognormal", "file"}  # which pydantic puts into places


class ScenarioError(Exception):
    """A scenario that cannot be used. ``str()`` is for a person at a terminal."""


class Prefix(Part):
    """Beginnings that prompts share: count different ones of length tokens, before share of the prompts."""

    count: int = Field(1, strict=True, ge=1, le=10_000)
    length: Tokens
    share: float = Field(1.0, ge=0, le=1)


class Cancel(Part):
    """rate: the share of requests left in the middle, after a number of tokens drawn evenly from 1 to the output's."""

    rate: float = Field(ge=0, le=1)


class Slo(Part):
    """A promise: the first token within ttft_ms, the others tpot_ms each on average."""

    ttft_ms: float = Field(gt=0)
    tpot_ms: float = Field(gt=0)


SLOS = {"chat": Slo(ttft_ms=200, tpot_ms=50), "rag": Slo(ttft_ms=300, tpot_ms=100),
        "mlperf": Slo(ttft_ms=450, tpot_ms=40), "batch": Slo(ttft_ms=2000, tpot_ms=200)}  # fmt: skip


class Scenario(Part):
    """A load. prompt: the lengths without the shared prefix. Exactly one of requests and seconds: how many, or for how
    long they are begun. warmup: requests sent before, all at once, that do not count."""

    title: str = ""
    seed: int = Field(1, strict=True, ge=0)
    requests: int | None = Field(None, strict=True, ge=1, le=10_000_000)
    seconds: float | None = Field(None, gt=0, le=86_400)
    warmup: int = Field(0, strict=True, ge=0, le=10_000)
    arrival: Arrival
    prompt: Lengths
    output: Lengths
    prefix: Prefix | None = None
    cancel: Cancel = Cancel(rate=0)
    slo: Mapping[str, Slo] = SLOS

    @field_validator("slo")
    @classmethod
    def _named(cls, slo: Mapping[str, Slo]) -> Mapping[str, Slo]:
        if not slo:
            raise ValueError("is empty; leave it out for the usual pairs, or name one: [slo.chat]")
        return slo

    @model_validator(mode="after")
    def _one_end(self) -> Scenario:
        if (self.requests is None) == (self.seconds is None):
            raise ValueError("requests and seconds: give exactly one of them")
        return self


def load(name: str | Path, **changes: Any) -> Scenario:
    """The scenario of a path, or one of those that come along (chat …). changes: top-level fields given instead."""
    path = _path(str(name))
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        raise ScenarioError(f"{path}: cannot be read: {e}") from e
    except tomllib.TOMLDecodeError as e:
        raise ScenarioError(f"{path}: is no TOML: {e}") from e
    values |= {k: v for k, v in changes.items() if v is not None}
    for given, other in (("requests", "seconds"), ("seconds", "requests")):
        if changes.get(given) is not None:
            values.pop(other, None)
    try:
        return Scenario.model_validate(values, context={"folder": path.parent})
    except ValidationError as e:
        raise ScenarioError("\n".join(f"{path}: {_explain(error)}" for error in e.errors())) from None


def _path(name: str) -> Path:
    known = sorted(p.stem for p in FOLDER.glob("*.toml"))
    if name in known:
        return FOLDER / f"{name}.toml"
    if not Path(name).is_file():
        raise ScenarioError(f"{name}: is neither a file nor one of the scenarios that come along: {', '.join(known)}")
    return Path(name)


def _explain(error: Any) -> str:
    """One of pydantic's errors as field: what; remedy."""
    field = ".".join(str(part) for part in error["loc"] if part not in _KINDS)
    message, kind = str(error["msg"]).removeprefix("Value error, "), error["type"]
    if kind == "extra_forbidden":
        message = "is no field of a scenario; correct its name or remove it (loadtest/README.md has all)"
    elif kind == "missing":
        message = "is missing; add it (loadtest/README.md has an example)"
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        tags = error["ctx"].get("expected_tags") or "closed, poisson, burst, or fixed, uniform, lognormal, file"
        field, message = f"{field}.kind", f"is not known or missing; give one of {tags}"
    elif kind != "value_error":
        message = f"{message}; it is {error['input']!r}"
    return f"{field}: {message}" if field else message
