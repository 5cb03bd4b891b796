"""Which cached slab goes first. A policy is one pure function from (entry, now) to its priority, in a file of its own
and one line here. The slab with the least priority is evicted.

The priority is computed once, when a slab loses its last holder: nothing about a cached slab changes, as every use
takes it out of the cache and later puts it back. So ageing must be in the priority itself, as a point in time, and the
order of two cached slabs never depends on when they are compared. All here break ties by the deepest slab first, the
right order within a sequence: a slab is of no use without those in view before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .lfu import lfu
from .lru import lru
from .size_aware import size_aware

Priority = tuple[float, int]


class Entry(Protocol):
    """What a policy may know of a slab."""

    ordinal: int  # its place in its sequence
    uses: int  # requests that had it, the one that computed it included
    last_use: float  # seconds


Policy = Callable[[Entry, float], Priority]

POLICIES: dict[str, Policy] = {
    "lru": lru,
    "lfu": lfu,
    "size_aware": size_aware,
}
