"""What a run's records come to. loadtest/README.md says what each figure means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from .runner import Record, Run
from .scenario import Slo

PERCENTILES = (50, 90, 99)


def percentile(ordered: Sequence[float], p: float) -> float:
    """Nearest rank: the smallest value that p per cent of all do not exceed. ordered: ascending, not empty."""
    return ordered[max(0, -int(-p * len(ordered) // 100) - 1)]


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Percentiles and the maximum; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return {f"p{p}": percentile(ordered, p) for p in PERCENTILES} | {"max": ordered[-1]}


def ttft(record: Record) -> float:
    """Seconds from when the request was due to its first token."""
    return record.arrivals[0] - record.due


def tpot(record: Record) -> float:
    """Seconds per token after the first; 0 where there is one only."""
    return (record.arrivals[-1] - record.arrivals[0]) / max(1, record.tokens - 1)


def meets(record: Record, slo: Slo) -> bool:
    return 1000 * ttft(record) <= slo.ttft_ms and 1000 * tpot(record) <= slo.tpot_ms


def goodput(records: Sequence[Record], slos: Mapping[str, Slo], seconds: float) -> dict[str, dict[str, float]]:
    """Requests that kept each promise: per second, and their share of all that were not left. A failure keeps none."""
    counted = [r for r in records if not r.left]
    kept = {name: sum(r.failure is None and meets(r, slo) for r in counted) for name, slo in slos.items()}
    return {name: {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "requests_per_s": kept[name] / seconds,
                   "share": kept[name] / max(1, len(counted))} for name, slo in slos.items()}  # fmt: skip


def figures(run: Run, slos: Mapping[str, Slo]) -> dict[str, Any]:
    """Every figure of a run. Times in ms; None where nothing was measured."""
    records, well = run.records, [r for r in run.records if r.failure is None]
    done = [r for r in well if not r.left]
    tokens = sum(r.tokens for r in records)
    times = {
        "ttft_ms": (ttft(r) for r in well),
        "itl_ms": (later - earlier for r in well for earlier, later in pairwise(r.arrivals)),
        "tpot_ms": (tpot(r) for r in well if r.tokens > 1),
        "e2e_ms": (r.end - r.due for r in done),
    }
    return {
        "sent": len(records), "done": len(done), "left": sum(r.left for r in well),
        "failed": dict(Counter(r.failure for r in records if r.failure is not None)),
        "seconds": run.seconds, "prompt_tokens": sum(len(r.request.prompt) for r in records), "output_tokens": tokens,
        "output_tokens_per_s": tokens / run.seconds, "requests_per_s": len(done) / run.seconds,
        **{name: spread(1000 * s for s in seconds) for name, seconds in times.items()},
        "goodput": goodput(records, slos, run.seconds),
        "generator": {"cores": run.cores, "late_ms": spread(1000 * (r.sent - r.due) for r in records)},
    }  # fmt: skip


def samples(run: Run) -> list[dict[str, Any]]:
    """What each request saw, for plots: seconds from the beginning, gaps in ms."""
    return [{"due": round(r.due, 6), "first": round(r.arrivals[0], 6) if r.arrivals else None, "end": round(r.end, 6),
             "prompt": len(r.request.prompt), "tokens": r.tokens, "left": r.left, "failure": r.failure,
             "gaps_ms": [round(1000 * (later - earlier), 3) for earlier, later in pairwise(r.arrivals)]}
            for r in run.records]  # fmt: skip
