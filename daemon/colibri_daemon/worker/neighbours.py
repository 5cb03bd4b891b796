"""What another request of this worker has computed of a slab that is not full: copied instead of computed again.

The prefix cache has whole slabs only. Requests that come together with one long prompt would each compute the end of it
that does not fill a slab, and their own question with it; while one of them is still here, the others copy. Only
requests that may share the cache share this, so that nobody learns from the time what others ask. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from colibri_engine._colibri import lib
from colibri_engine.batch import Lane

from .request import Request

LEAST = 16  # tokens; fewer are computed about as fast as their slab is copied


def begun(request: Request, others: Iterable[Request]) -> tuple[int, int] | None:
    """(slab, tokens): the slab that comes next for the request, as another has it, and how many tokens of the request's
    text are in the KV cache then; of several the most. None: nobody has LEAST more of it."""
    mine, found = request.lane, []
    for other in _twins(request, others):
        tokens, slab = min(_common(mine, other.lane), other.lane.position), _next_slab(mine, other.lane)
        if slab is not None and tokens >= mine.position + LEAST:
            found.append((tokens, slab))
    return max(found)[::-1] if found else None


def coming(request: Request, running: Iterable[Request]) -> bool:
    """Whether one of these, in prefill, has still to compute what the request could copy then."""
    mine = request.lane
    for other in _twins(request, running):
        theirs, tokens = other.lane, _common(mine, other.lane)
        if theirs.target - theirs.position > 1 and tokens > theirs.position and tokens >= mine.position + LEAST:
            return True
    return False


def _twins(request: Request, others: Iterable[Request]) -> list[Request]:
    """Those whose keys and values are the request's as far as the texts are one, which they are up to its position."""
    mine = request.lane
    before = mine.position // mine.info.slab_tokens
    last = mine.slabs[before - 1] if before else None
    if not request.cache or last == lib.COLIBRI_NO_SLAB:
        return []
    return [other for other in others
            if other is not request and other.cache and other.salt == request.salt
            and other.lane.attention == mine.attention and other.lane.position >= mine.position
            and (not before or other.lane.slabs[before - 1] == last)]  # fmt: skip


def _next_slab(mine: Lane, theirs: Lane) -> int | None:
    ordinal = mine.position // mine.info.slab_tokens
    slab = int(theirs.slabs[ordinal]) if theirs.n_slabs > ordinal else lib.COLIBRI_NO_SLAB
    return None if slab == lib.COLIBRI_NO_SLAB else slab


def _common(mine: Lane, theirs: Lane) -> int:
    """Tokens up to where the texts differ; less than the whole slab, and not more than mine can do without."""
    start, size = mine.position, mine.info.slab_tokens
    end = min(theirs.length, mine.cacheable, (start // size + 1) * size - 1)
    differ = np.flatnonzero(mine.tokens[start:end] != theirs.tokens[start:end])
    return start + int(differ[0]) if len(differ) else max(start, end)
