"""The slabs and their states; the queue of cached ones. What a state means for others is pool.py's."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import Enum

from .messages import WorkerId
from .policies import Policy, Priority
from .prefix import Node


class State(Enum):
    """Each slab has exactly one."""

    FREE = "free"
    LEASED = "leased"  # one worker's: in its free list, or being written
    COMMITTED = "committed"  # immutable; held by one request or more
    CACHED = "cached"  # immutable, in the prefix index, no holder
    QUARANTINED = "quarantined"  # its contents did not match its CRC: no more use
    WITHHELD = "withheld"  # has no pages: other arenas still take the memory, or it was given back

    __hash__ = object.__hash__  # Enum's own is written in Python and costs a fifth of an alloc


@dataclass(slots=True, eq=False)
class Slab:
    """Below ``worker`` all counts only while it is committed or cached; uses and so on are what policies go by."""

    number: int
    state: State = State.FREE
    worker: WorkerId | None = None  # of a leased one
    holders: int = 0
    node: Node | None = None  # its contents; None: not known (a worker declared it, but the journal has no record)
    ordinal: int = 0
    crc: int = 0
    committed: float = 0.0  # when
    uses: int = 0
    last_use: float = 0.0
    checked: int = 0  # deaths by fault before its contents were last known to be right
    stamp: int = 0  # grows each time it is cached: tells live entries of the queue from old ones


@dataclass(slots=True, eq=False)
class SlabTable:
    """Changes of state go through move() and cache(), so that the counts and the free list are always right.

    Eviction order is a heap of (priority, stamp, number). A slab that leaves the cache leaves its entry behind, which
    is skipped when it comes up: O(log n) for each slab cached, none of it a scan. Old entries are swept out when they
    are the majority, so the heap is at most twice as long as there are slabs, a sweep costs O(1) per slab cached."""

    count: int
    policy: Policy
    all: list[Slab] = field(init=False)
    counts: dict[State, int] = field(init=False)
    free: dict[int, None] = field(init=False)  # an ordered set: the last one freed is the first one used again
    withheld: dict[int, None] = field(default_factory=dict)
    _queue: list[tuple[Priority, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all = [Slab(number) for number in range(self.count)]
        self.counts = dict.fromkeys(State, 0) | {State.FREE: self.count}
        self.free = dict.fromkeys(reversed(range(self.count)))

    def __getitem__(self, number: int) -> Slab:
        return self.all[number]

    def move(self, slab: Slab, state: State) -> None:
        if slab.state is State.FREE:
            del self.free[slab.number]
        elif slab.state is State.WITHHELD:
            del self.withheld[slab.number]
        self.counts[slab.state] -= 1
        self.counts[state] += 1
        slab.state = state
        if state is State.FREE:
            self.free[slab.number] = None
        elif state is State.WITHHELD:
            self.withheld[slab.number] = None

    def cache(self, slab: Slab, now: float) -> None:
        self.move(slab, State.CACHED)
        slab.stamp += 1
        heapq.heappush(self._queue, (self.policy(slab, now), slab.stamp, slab.number))
        if len(self._queue) > 2 * self.counts[State.CACHED] + 64:
            self._queue = [entry for entry in self._queue if self._is_live(entry)]
            heapq.heapify(self._queue)

    def next_free(self) -> Slab:
        number, _ = self.free.popitem()
        self.free[number] = None
        return self.all[number]

    def worst(self) -> Slab:
        """The cached slab to evict next; there must be one. It leaves the queue, and must leave the cache."""
        while not self._is_live(entry := heapq.heappop(self._queue)):
            pass
        return self.all[entry[2]]

    def queued(self) -> set[int]:
        return {entry[2] for entry in self._queue if self._is_live(entry)}

    def _is_live(self, entry: tuple[Priority, int, int]) -> bool:
        slab = self.all[entry[2]]
        return slab.state is State.CACHED and slab.stamp == entry[1]
