"""Results on a terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from statistics import median
from typing import Any

from .probe import RATES, Ceilings
from .run import Result

_HEAD = (f"{'test':<8}{'n':>6}{'depth':>7}{'batch':>7}{'threads':>9}{'tokens/s':>11}{'ceiling':>11}"
         f"{'of ceiling':>12}")  # fmt: skip
_UNITS = {"read": ("read_gb_s", "GB/s"), "int8": ("int8_gops", "GOPS"), "f32": ("f32_gflops", "GFLOPS")}


def header() -> str:
    return _HEAD


def row(r: Result) -> str:
    return (f"{r.test:<8}{r.n:>6}{r.depth:>7}{r.batch:>7}{r.threads:>9}{_rate(r.tokens_per_s):>11}"
            f"{_rate(r.ceiling_tokens_per_s):>11}{r.share_of_ceiling:>12.1%}")  # fmt: skip


def _rate(tokens: float) -> str:
    return f"{tokens:.1f}" if tokens < 1000 else f"{tokens:.0f}"


def machine(results: list[Result]) -> str:
    """What the machine could do while these were measured, all with as many threads: median (lowest...highest)."""
    probed = [found for r in results for found in r.machine]
    threads = f"{probed[0].threads} thread{'s' if probed[0].threads > 1 else ''}"
    rates = ", ".join(_span(rate, (getattr(found, rate) / 1e9 for found in probed)) for rate in RATES)
    return f"machine, {threads}, {probed[0].isa}: {rates}"


def _span(rate: str, values: Iterable[float]) -> str:
    found = sorted(values)
    digits = 1 if rate == "read" else 0
    middle, low, high = (f"{value:.{digits}f}" for value in (median(found), found[0], found[-1]))
    return f"{rate} {middle} {_UNITS[rate][1]} ({low}...{high})"


def as_json(results: list[Result]) -> str:
    """A list of {test, n, depth, batch, threads, tokens_per_s, share_of_ceiling, ceiling_tokens_per_s, machine}, the
    last being {read_gb_s, int8_gops, f32_gflops} with that row's number of threads: medians over its repeats."""
    return json.dumps([asdict(r) | {"machine": _middle(r.machine)} for r in results], indent=1)


def _middle(probed: tuple[Ceilings, ...]) -> dict[str, Any]:
    return {_UNITS[rate][0]: median(getattr(found, rate) / 1e9 for found in probed) for rate in RATES}
