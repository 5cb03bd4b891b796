"""What the pool knows of a request while it has slabs or waits for some, and of a worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from .messages import FULL_MASK, TOKEN, Request, WorkerId
from .prefix import Node


@dataclass(slots=True, eq=False)
class Sequence:
    """A request that was attached by a worker, until it is released. The same key may have two for a while: one of a
    worker that is lost, or that has just let it go, and one of the worker that goes on with it. Each has holds of its
    own."""

    key: int
    worker: WorkerId | None  # None: an orphan; its worker is dead and nobody has taken it over yet
    request: Request
    slab_tokens: int
    next: int  # ordinal of the next commit
    node: Node | None = None  # contents of the slab before that (a root if there is none); None: not known
    slabs: dict[int, int] = field(default_factory=dict)  # ordinal -> slab
    redo: set[int] = field(default_factory=set)  # declared after our restart: their commit may come once more
    to_check: list[int] = field(default_factory=list)  # attached with a CRC; known to be right at the next commit,
    faults: int = 0  # as of this many deaths by fault
    given_back: int = 0  # ordinals before this and behind the pinned ones are given back
    dropped: bool = False  # the dispatcher knows it no more: not to be taken over
    waiters: dict[Waiter, None] = field(default_factory=dict)
    frontier: Node | None = None  # where pending.py lists it

    def mask(self, ordinal: int) -> bytes:
        return FULL_MASK if ordinal < self.request.full_slabs(self.slab_tokens) else self.request.mask

    def known(self, ordinal: int) -> bytes | None:
        """The request's token ids in this slab; None unless all of them are known."""
        step = self.slab_tokens * TOKEN
        chunk = self.request.tokens[ordinal * step : (ordinal + 1) * step]
        return chunk if len(chunk) == step else None


@dataclass(slots=True, eq=False)
class Waiter:
    """A request whose attach is not answered yet: until ``owner`` commits slab ``target``, or can no more."""

    worker: WorkerId
    key: int
    request: Request
    owner: Sequence | None = None
    target: int = 0


@dataclass(slots=True, eq=False)
class Worker:
    """verifying: how often it was told to verify what it has and has not answered yet."""

    id: WorkerId
    leased: set[int] = field(default_factory=set)
    sequences: dict[int, Sequence] = field(default_factory=dict)  # by key
    waiters: dict[int, Waiter] = field(default_factory=dict)
    verifying: int = 0
