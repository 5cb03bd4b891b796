"""What the pool tells the dispatcher of itself: exported metrics' names without their prefix, and numbers."""

from __future__ import annotations

from .pool import Pool


def stats(pool: Pool) -> dict[str, float]:
    """Of one pool process: counters begin at 0 when it starts again."""
    counters = pool.counters
    found: dict[str, float] = {f'kv_slabs{{state="{state}"}}': count for state, count in pool.counts().items()}
    found |= {
        "prefix_cache_queries_total": counters.prefix_cache_queries,
        "prefix_cache_hits_total": counters.prefix_cache_hits,
        "kv_quarantined_total": counters.kv_quarantined,
    }
    for name, reasons in (
        ("prefix_cache_rejects_total", counters.prefix_cache_rejects),
        ("kv_evictions_total", counters.kv_evictions),
        ("kv_leases_reclaimed_total", counters.kv_leases_reclaimed),
    ):
        found |= {f'{name}{{reason="{reason}"}}': count for reason, count in reasons.items()}
    for (slot, _), leases in pool.leases().items():
        name = f'kv_leases{{worker="{slot}"}}'
        found[name] = found.get(name, 0) + leases
    return found
