"""Whose turn it is: fair share of tokens between owners. Pure.

Each owner has a clock that advances by the tokens served to it; the owner whose clock is furthest behind goes next
(start-time fair queueing). An owner who comes back after a pause starts at the clock of the one served last: nobody
saves up a share, nobody pays for an empty house.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from heapq import nlargest
from operator import itemgetter

MAX_OWNERS = 4096  # remembered at most; then the half that owes least is forgotten


class FairShare:
    def __init__(self) -> None:
        self._served: dict[Hashable, float] = {}
        self._now = 0.0  # clock of the owner served last

    def first(self, owners: Iterable[Hashable]) -> Hashable:
        """The one whose turn it is; among equals the first."""
        return min(owners, key=self.clock)

    def clock(self, owner: Hashable) -> float:
        return max(self._served.get(owner, 0.0), self._now)

    def serve(self, owner: Hashable, tokens: float) -> None:
        """owner was chosen, and gets this many tokens to begin with."""
        start = self.clock(owner)
        self._now = start
        self._served[owner] = start + tokens
        if len(self._served) > MAX_OWNERS:
            self._served = dict(nlargest(MAX_OWNERS // 2, self._served.items(), key=itemgetter(1)))

    def charge(self, owner: Hashable, tokens: float) -> None:
        """owner got more, later."""
        self._served[owner] = self.clock(owner) + tokens
