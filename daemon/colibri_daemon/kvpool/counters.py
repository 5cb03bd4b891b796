"""What the pool counts for metrics.py. It never decreases: the journal keeps it when the process is killed."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from dataclasses import dataclass, field

from .policies import POLICIES

TOTALS = ("prefix_cache_queries", "prefix_cache_hits", "kv_quarantined")
REASONS = {
    "prefix_cache_rejects": ("token_mismatch", "stale", "hole"),
    "kv_evictions": ("window", "admin", "retire", *POLICIES),
    "kv_leases_reclaimed": ("worker_death", "abort"),
}
_COUNT = len(TOTALS) + sum(map(len, REASONS.values()))
_PACKED = struct.Struct(f"<{1 + _COUNT}Q")
_LAYOUT = zlib.crc32(repr((TOTALS, REASONS)).encode())  # first: numbers of other names are not ours
COUNTERS_BYTES = _PACKED.size


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
    # admin: dropped by the administrator;  retire: this pool is being replaced
    kv_leases_reclaimed: Counter[str] = field(default_factory=Counter)  # slabs. worker_death; abort: orphans dropped
    kv_quarantined: int = 0

    def pack(self) -> bytes:
        """COUNTERS_BYTES for restore()."""
        totals = [getattr(self, name) for name in TOTALS]
        return _PACKED.pack(_LAYOUT, *totals, *(getattr(self, name)[r] for name, rs in REASONS.items() for r in rs))

    def restore(self, packed: bytes) -> None:
        layout, *numbers = _PACKED.unpack(packed)
        if layout != _LAYOUT:
            return
        rest = iter(numbers)
        for name in TOTALS:
            setattr(self, name, next(rest))
        for name, reasons in REASONS.items():
            setattr(self, name, Counter({reason: next(rest) for reason in reasons}))
