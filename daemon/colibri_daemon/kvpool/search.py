"""How much of a request is resident: from the prefix index, and from what the same request held in another worker."""

from __future__ import annotations

from dataclasses import dataclass

from .ledger import Ledger
from .messages import TOKEN, Request
from .policies.pinned_window import longest_hit
from .prefix import Node
from .sequences import Sequence
from .slabs import Slab


@dataclass(slots=True)
class Hit:
    """The request can go on behind ``count`` slabs. node: contents of the last one, or the root; None: not known."""

    count: int
    slabs: list[Slab | None]  # by ordinal
    node: Node | None

    @property
    def has_hole(self) -> bool:
        """More is resident than can be used."""
        return any(self.slabs[self.count :])


def find(ledger: Ledger, request: Request, previous: Sequence | None) -> Hit:
    """previous: the request in another worker."""
    size, most = ledger.slab_tokens, request.limit // ledger.slab_tokens
    path: list[Node] = []
    if request.use:
        path = ledger.index.walk(request.salt, request.tokens, most, request.full_slabs(size), request.mask)
    slabs = [None if node.slab is None else ledger.table[node.slab] for node in path[1:]]
    if previous is not None and not previous.dropped and previous.request.same_content(request):
        _add_own(ledger, previous, request, most, slabs)
    count = longest_hit(slabs, request.pinned, request.window, size)
    return Hit(count, slabs, _end(path, slabs, count))


def _add_own(ledger: Ledger, previous: Sequence, request: Request, most: int, slabs: list[Slab | None]) -> None:
    """What the request itself has is resident even if it is not indexed: its place is known by the key and the ordinal.
    Its tokens are compared all the same."""
    step = ledger.slab_tokens * TOKEN
    for ordinal, number in previous.slabs.items():
        own = ledger.table[number]
        chunk = request.tokens[ordinal * step : (ordinal + 1) * step]
        if ordinal < most and own.node is not None and own.ordinal == ordinal and own.node.tokens == chunk:
            slabs.extend([None] * (ordinal + 1 - len(slabs)))
            slabs[ordinal] = slabs[ordinal] or own


def _end(path: list[Node], slabs: list[Slab | None], count: int) -> Node | None:
    if count < len(path):
        return path[count]
    last = slabs[count - 1] if count else None
    return last.node if last else None
