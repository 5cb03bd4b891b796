"""Who computes what another one needs next, so that a prefix that many ask for at once is computed once.

A request is *pending* while the token ids of its next slab are known: its worker is computing that slab, and will go on
with those behind it. Another attach that ends at the same node and needs the same slab waits until the owner has
committed the last slab that both share.

No deadlock: a waiter has no slabs and nobody waits for it, since only attached requests are pending. An attached one
never waits, so every chain of waits has one link. It is woken when its owner commits the target, commits a slab that
cannot be found, or has no worker any more; the pool answers the woken in the order in which they came, and the first
that finds no owner becomes one.
"""

from __future__ import annotations

from .messages import Request
from .prefix import Node
from .sequences import Sequence, Waiter


class Pending:
    def __init__(self, slab_tokens: int) -> None:
        self._slab_tokens = slab_tokens
        self._at: dict[Node, list[Sequence]] = {}

    def put(self, sequence: Sequence) -> None:
        """Lists it at its end, if others could find and use what it computes next."""
        node = sequence.node
        if node is not None and node.indexed and sequence.known(sequence.next) is not None:
            sequence.frontier = node
            self._at.setdefault(node, []).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        node, sequence.frontier = sequence.frontier, None
        if node is None:
            return
        listed = self._at[node]
        listed.remove(sequence)
        if not listed:
            del self._at[node]

    def wait(self, waiter: Waiter, node: Node | None, ordinal: int) -> bool:
        """Lets waiter, which would compute slab ``ordinal`` behind node next, wait for whoever shares most with it.
        False if there is nobody."""
        best, target = None, ordinal
        for owner in self._at.get(node, ()) if node is not None else ():
            shared = self._shared(owner, waiter.request, ordinal)
            if owner.key != waiter.key and shared > target:
                best, target = owner, shared
        if best is None:
            return False
        waiter.owner, waiter.target = best, target - 1
        best.waiters[waiter] = None
        return True

    def _shared(self, owner: Sequence, request: Request, ordinal: int) -> int:
        """Number of slabs, those before ``ordinal`` included, that owner will commit and request can use."""
        mine = Sequence(0, None, request, self._slab_tokens, 0)
        most = request.limit // self._slab_tokens
        for at in range(ordinal, most):
            if owner.known(at) != mine.known(at) or owner.mask(at) != mine.mask(at):
                return at
        return most

    @property
    def listed(self) -> list[Sequence]:
        return [sequence for at in self._at.values() for sequence in at]
