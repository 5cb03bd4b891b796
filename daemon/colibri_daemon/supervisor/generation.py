"""What belongs to one configuration: a generation with its workers, the KV pool it uses, the dispatcher in front of it.

    coming ──serves──> serving ──a later one serves──> emptying ──its last request ends──> leaving ──> gone
       └──────────────── its start failed ────────────────────────────────────────────────────┘

Two generations whose slabs mean the same share a pool. All but a package upgrade share the dispatcher.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..common.facts import ModelFacts
from ..common.pages import Page
from ..common.settings import Settings
from .children import Goal, Steady, Worker
from .kv_memory import KvMemory
from .lifecycle import NEVER, State
from .roles import Role
from .weights import WeightFiles

RETIRED_SECONDS = 3600.0  # longest deadline of a request: so long may a replaced dispatcher take to finish
HEARING_SECONDS = 1.0  # a process may have ended with what was said to it in this time unread
POOL_SETTINGS = ("kv_eviction", "hang_seconds")  # that a pool is started with


class Pool(Steady):
    """KV memory and the process that accounts for it. usable: slabs that may have pages now; held: slabs that have them
    (all of the usable ones until the pool says otherwise). retired: nothing new comes in. faulted: when a worker
    last died by a fault; ended: when the former process did."""

    def __init__(self, role: Role, page: Page, epochs: Iterator[int], fresh: bool, number: int, memory: KvMemory,
                 settings: Settings, facts: ModelFacts, taken: int) -> None:
        super().__init__(role, page, epochs, fresh)
        self.number, self.memory, self.settings, self.facts = number, memory, settings, facts
        self.usable = self.held = memory.usable(taken)
        self.retired = False
        self.faulted = self.ended = NEVER if memory.note.doubt is None else memory.note.doubt

    @property
    def missed_fault(self) -> float | None:
        """When a worker died by a fault, if the former process may not have heard of it."""
        return self.faulted if self.faulted != NEVER and self.ended - HEARING_SECONDS < self.faulted else None

    def doubt(self, now: float) -> float:
        """What missed_fault would be for the next life of the service if this one ended now, without a word."""
        missed = self.missed_fault
        return now - HEARING_SECONDS if missed is None or self.ready else missed

    @property
    def bytes(self) -> int:
        """What its arena takes."""
        return self.held * self.memory.arena.slab_bytes

    def fits(self, settings: Settings, facts: ModelFacts) -> bool:
        """Whether another configuration can use this memory: its slabs have the same size and meaning, and there are as
        many as it asks for. A default is not decided anew."""
        arena = self.memory.arena
        same = _meaning(facts) == _meaning(self.facts)
        asked = settings.kv_bytes // facts.slab_bytes if settings.kv_bytes else None
        wanted = settings.kv_bytes == self.settings.kv_bytes or asked == arena.slabs
        return same and wanted and not self.retired and self.goal <= Goal.RUN

    def adopt(self, settings: Settings) -> bool:
        """The settings of a later generation; whether only another process can follow them."""
        changed = any(getattr(settings, name) != getattr(self.settings, name) for name in POOL_SETTINGS)
        self.settings = settings
        return changed

    def widen(self, taken: int) -> bool:
        """Other arenas take so many bytes now; whether more slabs are usable than before."""
        usable = self.memory.usable(taken)
        if self.retired or usable <= self.usable:
            return False
        self.usable = self.held = usable
        return True


def _meaning(facts: ModelFacts) -> tuple[object, ...]:
    return facts.id, facts.fingerprint, facts.kv_format, facts.slab_bytes, facts.slab_tokens


class Dispatcher(Steady):
    """version: of the package it runs. drained: it has said so. retires: when it must be done, once it is replaced."""

    def __init__(self, role: Role, page: Page, epochs: Iterator[int], fresh: bool, version: str) -> None:
        super().__init__(role, page, epochs, fresh)
        self.version = version
        self.drained = False
        self.retires = NEVER

    @property
    def retired(self) -> bool:
        return self.retires != NEVER


class Generation:
    """Settings and facts never change; workers come and go in their slots. empty: nothing it has to serve is left.
    spoiled: why its weights cannot be trusted any more; no worker is started then. weights: its own to close."""

    def __init__(self, number: int, settings: Settings, facts: ModelFacts, weights: WeightFiles, pool: Pool,
                 dispatcher: Dispatcher, workers: list[Worker]) -> None:
        self.number, self.settings, self.facts, self.weights = number, settings, facts, weights
        self.pool, self.dispatcher, self.workers = pool, dispatcher, workers
        self.empty = False
        self.spoiled = ""

    @property
    def loaded(self) -> bool:
        """All that it needs to serve is ready, but for the dispatcher."""
        return all(child.life.state is State.READY for child in (self.pool, *self.workers))

    @property
    def lost(self) -> bool:
        """It will never work again."""
        given_up = [child.life.state is State.FAILED for child in (self.pool, *self.workers)]
        return given_up[0] or all(given_up[1:]) or bool(self.spoiled) and not self.running

    @property
    def running(self) -> bool:
        return any(worker.life.running for worker in self.workers)

    def aim(self, goal: Goal) -> None:
        for worker in self.workers:
            worker.aim(goal)
