"""How a sequence gives slabs back, and what it must have to go on: a query at position t sees [0, P) and (t - W, t].

All here counts in slabs of T tokens; window 0 is full attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...common.kv import out_of_view


def hidden_after(ordinal: int, pinned: int, window: int, slab_tokens: int) -> range:
    """Ordinals that a sequence gives back once it has committed slab ``ordinal``: no query sees them from the boundary
    one slab before on. So whoever resumes it, even one token short of that slab's end, finds one without holes."""
    return out_of_view((ordinal + 1) * slab_tokens, pinned, window, slab_tokens)


def view(slabs: int, pinned: int, window: int, slab_tokens: int) -> tuple[int, int]:
    """What must be there to go on behind ``slabs`` slabs: the ordinals in [0, first) and [second, slabs)."""
    if not window:
        return 0, 0
    first_seen = max(0, slabs * slab_tokens + 1 - window) // slab_tokens
    return min(slabs, -(-pinned // slab_tokens)), min(slabs, first_seen)


def longest_hit(resident: Sequence[Any], pinned: int, window: int, slab_tokens: int) -> int:
    """Most slabs that a sequence can go on behind. resident: by ordinal, true if there is a slab."""
    holes = [ordinal for ordinal, slab in enumerate(resident) if not slab]
    for slabs in range(len(resident), 0, -1):
        while holes and holes[-1] >= slabs:
            holes.pop()
        first, second = view(slabs, pinned, window, slab_tokens)
        if not holes or first <= holes[0] and holes[-1] < second:
            return slabs
    return 0
