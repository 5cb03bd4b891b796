"""Requests that wait for a worker: bounded, ordered, pure. Clocks are passed in.

Order: what a lost worker was running (oldest first); then owners who have fewer places in the batches than another one
(places.py); then by priority, which is a head start in waiting time; at the same priority the owner whose turn it is
(fairness.py); of one owner's the nearest deadline, then the oldest.

A head start rather than a rank, so that nobody starves: all age at the same pace, and the order of two requests does
not depend on when one looks. From priority -100 to 100 it is two thirds of the longest wait, so whoever has waited that
long comes before all who arrive later. The steps shrink, p / (1 + |p|): 1 is worth half of what 100 is, and people need
not agree on a scale.

A request that does not fit yet lets others pass, but only so many, and nobody whose owner has more places than its own:
then they wait until there is room for it. Suspects (poison.py) wait apart from all others, for a worker of their own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, takewhile, zip_longest
from typing import Generic, Protocol, TypeVar

from .drain import Returns
from .fairness import FairShare
from .places import LEAD, behind

HEAD_START = 1 / 3  # of the longest wait, for the highest priority; as much behind for the lowest
PASSES_MOST = 32  # requests that may pass one which does not fit yet
LOOK_MOST = 32  # requests looked at to find one that fits
RESERVE = 8  # the last 1/8 of both bounds is for owners that have less than half of what waits


class Waiting(Protocol):
    """What the queue knows of a request. key: unique, grows with arrival. owner: (uid, tenant). cost: tokens to be
    computed before the first one comes out; length: when it ends, at most. Times are monotonic seconds."""

    key: int
    priority: int
    cost: int
    length: int
    arrived: float
    deadline: float

    @property
    def owner(self) -> Hashable: ...


@dataclass(frozen=True)
class Full:
    """Why a request was not taken. bound: "queue_full" (requests) or "queue_tokens"."""

    bound: str
    limit: int
    retry_after_ms: int


R = TypeVar("R", bound=Waiting)
Lines = dict[Hashable, list[R]]  # by owner, in order


def urgency(request: Waiting) -> tuple[float, int]:
    """The order in an owner's line."""
    return request.deadline, request.key


def _bound(most: int, own: int, everybodys: int) -> int:
    """For an owner who has so many of what waits."""
    return most - most // RESERVE if 2 * own > everybodys else most


class RequestQueue(Generic[R]):
    """Never holds more than the two bounds, except for what comes back from workers, which had been admitted."""

    def __init__(self, max_requests: int, max_tokens: int, now: float, patience: float, share: FairShare | None = None,
                 max_passes: int = PASSES_MOST) -> None:
        """patience: seconds that a request waits at most. share: of owners who wait in other queues too."""
        self.max_requests, self.max_tokens, self.max_passes = max_requests, max_tokens, max_passes
        self.tokens = 0
        self.share = share or FairShare()
        self.held: Mapping[Hashable, int] = {}  # places in batches by owner, to be told before one is chosen
        self._head_start = HEAD_START * patience
        self._apart: dict[int, R] = {}
        self._front: dict[int, R] = {}
        self._levels: dict[int, Lines[R]] = {}
        self._by_owner: dict[Hashable, list[int]] = {}  # requests and tokens of those who wait
        self._passes: dict[int, int] = {}  # by key: how many have passed it
        self._served: set[int] = set()  # keys of those that their owners were charged for before
        self._count = 0
        self._returns = Returns(now)

    def __len__(self) -> int:
        return self._count

    # ---- in --------------------------------------------------------------------------------------------------------

    def offer(self, request: R, now: float) -> Full | None:
        """Takes the request, or says why not. One that is larger than the whole bound gets in when nobody waits."""
        requests, tokens = self._by_owner.get(request.owner, (0, 0))
        most = _bound(self.max_requests, requests, self._count)
        if self._count >= most:
            return Full("queue_full", most, self.retry_after(request.cost, now, request.length))
        most = _bound(self.max_tokens, tokens, self.tokens)
        if self._count and self.tokens + request.cost > most:
            return Full("queue_tokens", most, self.retry_after(request.cost, now, request.length))
        if not self._count:
            self._returns.rate.skip(now)
        insort(self._line(request), request, key=urgency)
        self._add(request)
        return None

    def put_back(self, requests: list[R]) -> None:
        """In front of all others."""
        for request in requests:
            self._add(request)
        merged = [*self._front.values(), *requests]
        self._front = {request.key: request for request in sorted(merged, key=lambda r: r.key)}

    def put_again(self, request: R) -> None:
        """A preempted one: to its place in the order. It was paid for."""
        insort(self._line(request), request, key=urgency)
        self._served.add(request.key)
        self._add(request)

    def put_apart(self, request: R) -> None:
        """A suspect, which only choose_apart() gives."""
        self._apart[request.key] = request
        self._add(request)

    # ---- out -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[R]:
        """All that wait in order, without those apart."""
        yield from self._front.values()
        if first := behind(self.held, self._by_owner, 1):
            yield from self._ordered(lambda owner: owner in first)
            yield from self._ordered(lambda owner: owner not in first)
        else:
            yield from self._ordered(lambda _: True)

    def everybody(self) -> Iterator[R]:
        return chain(self._apart.values(), self)

    @property
    def is_owed_a_place(self) -> bool:
        """Somebody who waits, by somebody who has more."""
        return bool(behind(self.held, self._by_owner, LEAD))

    def head(self) -> R | None:
        """The first in order; it stays."""
        return next(iter(self), None)

    def choose(self, fits: Callable[[R], bool]) -> R | None:
        """The next to go: the first that fits, if it may pass those before it. It stays; None if there is none."""
        least = None  # places of an owner whose request does not fit
        for request in islice(self, LOOK_MOST):
            held = self.held.get(request.owner, 0)
            if least is not None and held > least:
                continue
            if fits(request):
                return request
            if self._passes.get(request.key, 0) >= self.max_passes:
                return None
            least = held if least is None else min(least, held)
        return None

    def choose_apart(self, fits: Callable[[R], bool]) -> R | None:
        """The first of those apart that fits."""
        return next(filter(fits, self._apart.values()), None)

    @property
    def apart(self) -> int:
        return len(self._apart)

    def take(self, request: R, now: float) -> None:
        """request, which one of the above gave, goes to a worker."""
        if request.key not in self._apart:
            for passed in takewhile(lambda before: before is not request, self):
                self._passes[passed.key] = self._passes.get(passed.key, 0) + 1
        if not any(request.key in paid for paid in (self._apart, self._front, self._served)):
            self.share.serve(request.owner, request.cost)
        if self._count > 1:
            self._returns.rate.add(request.cost, now)
        self.remove(request)

    def remove(self, request: R) -> None:
        """request, which waits, gives up its place."""
        self._count -= 1
        self.tokens -= request.cost
        self._passes.pop(request.key, None)
        self._served.discard(request.key)
        waiting = self._by_owner[request.owner]
        waiting[0] -= 1
        waiting[1] -= request.cost
        if not waiting[0]:
            del self._by_owner[request.owner]
        if self._apart.pop(request.key, None) is None and self._front.pop(request.key, None) is None:
            self._unline(request)

    def retry_after(self, cost: int, now: float, length: int = 0) -> int:
        """Milliseconds until there will be room for a refused request. length: 0 if its size is not why."""
        return self._returns.after(cost, length, self._count, now)

    def expect(self, rows_per_second: float) -> None:
        """What the workers say they can compute: for how fast the queue drains, until that has been seen."""
        self._returns.rows_per_second = rows_per_second

    # ---- levels and lines ------------------------------------------------------------------------------------------

    def _ordered(self, wanted: Callable[[Hashable], bool]) -> Iterator[R]:
        """The requests of some owners."""
        levels = []
        for priority, owners in self._levels.items():
            lines = {owner: line for owner, line in owners.items() if wanted(owner)}
            if lines:
                levels.append((self._rank(priority, lines), -priority, lines))
        for *_, lines in sorted(levels, key=lambda level: level[:2]):
            head = lines[self.share.first(lines)][0]
            yield head  # mostly nobody asks for more
            for row in zip_longest(*(lines[owner] for owner in sorted(lines, key=self.share.clock))):
                yield from (request for request in row if request is not None and request is not head)

    def _rank(self, priority: int, lines: Lines[R]) -> float:
        """When the level's longest waiting head would have come without its head start."""
        return min(line[0].arrived for line in lines.values()) - self._head_start * priority / (1 + abs(priority))

    def _line(self, request: R) -> list[R]:
        """Those of its owner and priority."""
        return self._levels.setdefault(request.priority, {}).setdefault(request.owner, [])

    def _unline(self, request: R) -> None:
        owners = self._levels[request.priority]
        line = owners[request.owner]
        del line[bisect_left(line, urgency(request), key=urgency)]
        if not line:
            del owners[request.owner]
        if not owners:
            del self._levels[request.priority]

    def _add(self, request: R) -> None:
        self._count += 1
        self.tokens += request.cost
        waiting = self._by_owner.setdefault(request.owner, [0, 0])
        waiting[0] += 1
        waiting[1] += request.cost
