"""Requests that wait for a worker: bounded, ordered, pure. Clocks are passed in.

Order: what a lost worker was running (oldest first), then priority, then fair share between owners, then arrival. The
fair share is fairness.py's; another policy is another object with its two methods. A request that does not fit yet lets
others pass, but only so many: then all wait until there is room for it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile, zip_longest
from typing import Generic, Protocol, TypeVar

from .fairness import FairShare

RATE_SECONDS, RATE_LEAST_SECONDS = 5.0, 0.1  # memory of the drain rate; below this it is not known yet
PASSES_MOST = 32  # requests that may pass one which does not fit yet
LOOK_MOST = 32  # requests looked at to find one that fits
RETRY_LEAST_MS, RETRY_MOST_MS, RETRY_UNKNOWN_MS = 50, 60_000, 1000


class Waiting(Protocol):
    """What the queue knows of a request. key: unique, grows with arrival. owner: (uid, tenant). cost: tokens to be
    computed before the first one comes out."""

    key: int
    priority: int
    owner: Hashable
    cost: int


@dataclass(frozen=True)
class Full:
    """Why a request was not taken. bound: "queue_full" (requests) or "queue_tokens"."""

    bound: str
    limit: int
    retry_after_ms: int


class DrainRate:
    """Exponentially fading average of requests and tokens per second, over the time in which someone waits."""

    def __init__(self, now: float) -> None:
        self._requests, self._tokens, self._seconds, self._at = 0.0, 0.0, 0.0, now

    def skip(self, now: float) -> None:
        """Nobody waited until now."""
        self._at = now

    def add(self, tokens: int, now: float) -> None:
        """A request went to a worker while others waited."""
        self._fade(now)
        self._requests += 1
        self._tokens += tokens

    def seconds_for(self, tokens: int, now: float) -> float | None:
        """How long until there is room for one more request of this size; None if not known."""
        self._fade(now)
        if self._seconds < RATE_LEAST_SECONDS or not self._requests:
            return None
        return max(1 / self._requests, tokens / max(1.0, self._tokens)) * self._seconds

    def _fade(self, now: float) -> None:
        keep = math.exp(-(now - self._at) / RATE_SECONDS)
        self._requests, self._tokens = self._requests * keep, self._tokens * keep
        self._seconds = self._seconds * keep + RATE_SECONDS * (1 - keep)
        self._at = now


R = TypeVar("R", bound=Waiting)


class RequestQueue(Generic[R]):
    """Never holds more than the two bounds, except for what comes back from workers, which had been admitted."""

    def __init__(self, max_requests: int, max_tokens: int, now: float, max_passes: int = PASSES_MOST) -> None:
        self.max_requests, self.max_tokens, self.max_passes = max_requests, max_tokens, max_passes
        self.tokens = 0
        self.share = FairShare()
        self._front: dict[int, R] = {}
        self._levels: dict[int, dict[Hashable, OrderedDict[int, R]]] = {}
        self._passes: dict[int, int] = {}  # by key: how many have passed it
        self._served: set[int] = set()  # keys of those that their owners were charged for before
        self._count = 0
        self._rate = DrainRate(now)
        self._promised = now  # when the last refused client may come back

    def __len__(self) -> int:
        return self._count

    def offer(self, request: R, now: float) -> Full | None:
        """Takes the request, or says why not. One that is larger than the whole bound gets in when nobody waits."""
        if self._count >= self.max_requests:
            return Full("queue_full", self.max_requests, self.retry_after(request.cost, now))
        if self._count and self.tokens + request.cost > self.max_tokens:
            return Full("queue_tokens", self.max_tokens, self.retry_after(request.cost, now))
        if not self._count:
            self._rate.skip(now)
        self._line(request)[request.key] = request
        self._add(request)
        return None

    def put_back(self, requests: list[R]) -> None:
        """In front of all others."""
        for request in requests:
            self._add(request)
        merged = [*self._front.values(), *requests]
        self._front = {request.key: request for request in sorted(merged, key=lambda r: r.key)}

    def put_again(self, request: R) -> None:
        """A preempted one: its place by age among those of its owner and priority. It was paid for."""
        line = self._line(request)
        line[request.key] = request
        for key in [key for key in line if key > request.key]:
            line.move_to_end(key)
        self._served.add(request.key)
        self._add(request)

    def __iter__(self) -> Iterator[R]:
        """All that wait, in order."""
        yield from self._front.values()
        for priority in sorted(self._levels, reverse=True):
            owners = self._levels[priority]
            head = next(iter(owners[self.share.first(owners)].values()))
            yield head  # mostly nobody asks for more
            lines = (owners[owner].values() for owner in sorted(owners, key=self.share.clock))
            for row in zip_longest(*lines):
                yield from (request for request in row if request is not None and request is not head)

    def head(self) -> R | None:
        """The first in order; it stays."""
        return next(iter(self), None)

    def choose(self, fits: Callable[[R], bool]) -> R | None:
        """The next to go: the first that fits, if it may pass those before it. It stays; None if there is none."""
        for request in islice(self, LOOK_MOST):
            if fits(request):
                return request
            if self._passes.get(request.key, 0) >= self.max_passes:
                return None
        return None

    def take(self, request: R, now: float) -> None:
        """request, which choose() or head() gave, goes to a worker."""
        for passed in takewhile(lambda before: before is not request, self):
            self._passes[passed.key] = self._passes.get(passed.key, 0) + 1
        if request.key not in self._front and request.key not in self._served:
            self.share.serve(request.owner, request.cost)
        if self._count > 1:
            self._rate.add(request.cost, now)
        self.remove(request)

    def remove(self, request: R) -> None:
        """request, which waits, gives up its place."""
        self._count -= 1
        self.tokens -= request.cost
        self._passes.pop(request.key, None)
        self._served.discard(request.key)
        if self._front.pop(request.key, None) is not None:
            return
        owners = self._levels[request.priority]
        entries = owners[request.owner]
        del entries[request.key]
        if not entries:
            del owners[request.owner]
        if not owners:
            del self._levels[request.priority]

    def retry_after(self, cost: int, now: float) -> int:
        """Milliseconds until there will be room at the rate at which the queue drains, given that all who were refused
        before come back when they were told to: each gets a time of its own."""
        interval = self._rate.seconds_for(cost, now)
        if interval is None:
            return RETRY_UNKNOWN_MS
        self._promised = min(max(self._promised, now) + interval, now + RETRY_MOST_MS / 1000)
        return min(max(RETRY_LEAST_MS, math.ceil((self._promised - now) * 1000)), RETRY_MOST_MS)

    def _line(self, request: R) -> OrderedDict[int, R]:
        """Those of its owner and priority."""
        return self._levels.setdefault(request.priority, {}).setdefault(request.owner, OrderedDict())

    def _add(self, request: R) -> None:
        self._count += 1
        self.tokens += request.cost
