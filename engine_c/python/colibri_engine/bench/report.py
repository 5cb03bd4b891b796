"""Results on a terminal and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from .run import Result

_HEAD = f"{'test':<8}{'n':>6}{'depth':>7}{'batch':>7}{'threads':>9}{'tokens/s':>11}{'of ceiling':>12}"


def header() -> str:
    return _HEAD


def row(r: Result) -> str:
    rate = f"{r.tokens_per_s:.1f}" if r.tokens_per_s < 1000 else f"{r.tokens_per_s:.0f}"
    return f"{r.test:<8}{r.n:>6}{r.depth:>7}{r.batch:>7}{r.threads:>9}{rate:>11}{r.share_of_ceiling:>12.1%}"


def as_json(results: list[Result]) -> str:
    """A list of {test, n, depth, batch, threads, tokens_per_s, share_of_ceiling}."""
    return json.dumps([asdict(r) for r in results], indent=1)
