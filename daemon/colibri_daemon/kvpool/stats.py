"""What the pool tells of itself: to the dispatcher in messages, by names of metrics without prefix, and in its page.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..common.counters import Counters
from .pool import Pool

P = ParamSpec("P")
R = TypeVar("R")


def stats(pool: Pool) -> dict[str, float]:
    """For the dispatcher."""
    found: dict[str, float] = {f'kv_slabs{{state="{state}"}}': count for state, count in pool.counts().items()}
    found |= {name: number for name, number in pool.counters.numbers().items() if "_total" in name}
    for (slot, _), leases in pool.leases().items():
        name = f'kv_leases{{worker="{slot}"}}'
        found[name] = found.get(name, 0) + leases
    return found


def show(pool: Pool) -> None:
    """The gauges."""
    counts = pool.counts()
    live = counts.pop("leased") + counts.pop("committed")
    for state, count in {"live": live, **counts}.items():
        pool.counters.set("kv_slabs", count, state=state)


class Calls:
    """How long the pool takes."""

    def __init__(self, counters: Counters) -> None:
        self._histograms = {op: counters.histogram("kv_call_duration_seconds", op=op)
                            for op in ("alloc", "attach", "commit", "release", "lookup")}

    def timed(self, op: str, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The call's result."""
        begun = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self._histograms[op].observe(time.perf_counter() - begun)
