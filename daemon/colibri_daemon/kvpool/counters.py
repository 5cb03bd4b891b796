"""What the pool counts for metrics.py; never decreases in the life of the process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    prefix_cache_queries: int = 0  # tokens of requests that may use the cache
    prefix_cache_hits: int = 0  # tokens of those that were attached
    prefix_cache_rejects: Counter[str] = field(default_factory=Counter)
    # token_mismatch  equal hash, other content: only a miss
    # stale           found below a part of the chain that was forgotten
    # hole            resident, but something in view before it is not
    kv_evictions: Counter[str] = field(default_factory=Counter)
    # the policy's name: cached, for somebody's alloc;  window: given back by a running request, out of its view
    kv_leases_reclaimed: Counter[str] = field(default_factory=Counter)  # slabs. worker_death; abort: orphans dropped
    kv_quarantined: int = 0
