"""What workers hold, against the real pool: messages delayed at random, requests that come, go and come again under the
same key, damaged slabs, a pool that dies with messages unread in both directions. No slab is ever written by two, the
pool never finds a worker at fault, and in the end nothing is missing."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

from colibri_daemon.common import pool_ipc
from colibri_daemon.common.kv import out_of_view
from colibri_daemon.kvpool.check import check
from colibri_daemon.kvpool.journal import Journal
from colibri_daemon.kvpool.pool import Pool
from colibri_daemon.kvpool.server import Server
from colibri_daemon.worker.holdings import Held, Holdings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

T, SLABS = 2, 14
GEOMETRY = {"slabs": SLABS, "slab_bytes": 64, "slab_tokens": T, "kv_format": "f32"}
TEXT_SLABS = 5
WORKERS = [(0, 1), (1, 1)]
Contents = dict[int, bytes]  # slab -> all tokens up to its end


def tokens(ids: list[int]) -> bytes:
    return b"".join(id.to_bytes(4, "little") for id in ids)


def hidden(held: Held) -> range:
    """Ordinals that no query of the request sees: what the pool may have given to another already."""
    return out_of_view(held.next * T, 0, held.wanted["window"], T)


class Worker:
    """Writes what it may and checks that it reads what it should. texts: by key, of requests that have not left."""

    def __init__(self, arena: Contents) -> None:
        self.holdings, self.arena = Holdings(), arena
        self.texts: dict[int, bytes] = {}
        self.tables: dict[int, dict[int, int]] = {}  # of those that are attached
        self.sent: deque[Any] = deque()
        self.heard: deque[Any] = deque()

    def attach(self, key: int, text: bytes, window: int) -> None:
        self.texts[key] = text
        self.holdings.attach(key, self._wanted(text, window))

    def _wanted(self, text: bytes, window: int) -> dict[str, Any]:
        return {"tokens": text, "salt": b"", "use": True, "pinned": 0, "window": window, "positions": "cache",
                "limit": len(text) // 4 - 1}  # fmt: skip

    def release(self, key: int) -> None:
        del self.texts[key]
        self.tables.pop(key, None)
        self.holdings.release(key)

    def compute(self, key: int) -> None:
        """One slab more, if there is one: taken, then filled and committed."""
        held, step = self.holdings.held[key], T * 4
        ordinal = held.next
        if ordinal not in held.own:
            if not self.holdings.free or ordinal == TEXT_SLABS:
                return
            slab = self.holdings.take(key, ordinal, 1)[0]
            self.tables[key][ordinal] = slab
            self.arena[slab] = self.texts[key][: (ordinal + 1) * step]
            return
        for each, slab in self.holdings.full(key, ordinal + 1):
            self.holdings.commit(key, each, slab, self.texts[key][each * step : (each + 1) * step], 7)

    def hear(self, message: list[Any]) -> None:
        match message:
            case [pool_ipc.GRANT, slabs]:
                self.holdings.granted(slabs)
            case [pool_ipc.ATTACHED, key, n, slabs]:
                if self.holdings.attached(key, [(o, s) for o, s, _ in slabs], n // T):
                    self.tables[key] = {o: s for o, s, _ in slabs}
            case [pool_ipc.COMMITTED, key, ordinals]:
                for ordinal in self.holdings.committed(key, ordinals):
                    del self.tables[key][ordinal]
        self.check()

    def damage(self, key: int, window: int) -> None:
        """One of the slabs of a request turns out to be bad."""
        slabs = self.holdings.held[key].slabs
        if slabs:
            bad = {next(iter(slabs.values()))}
            for each in self.holdings.holders(bad):
                del self.tables[each]
                self.holdings.attach_again(each, self._wanted(self.texts[each], window), bad)

    def check(self) -> None:
        """What is in its tables, as far as it is in view, is what the request computed, or another with its text."""
        for key, table in self.tables.items():
            held = self.holdings.held[key]
            for ordinal in table.keys() - set(hidden(held)):
                slab = table[ordinal]
                assert self.arena[slab] == self.texts[key][: (ordinal + 1) * T * 4]


class World:
    def __init__(self, random: Random, window: int) -> None:
        self.random, self.window, self.arena = random, window, Contents()
        self.workers = {id: Worker(self.arena) for id in WORKERS}
        self.journal = memoryview(bytearray(Journal.size(SLABS, T)))
        self.damaged = 0
        self.start([])

    def start(self, alive: list[tuple[int, int]]) -> None:
        pool = Pool(SLABS, T, "lru", b"", Journal(self.journal, SLABS, T, b""), alive, 0.0)
        self.server = Server(pool, GEOMETRY, 0.0, 1e9)
        for (slot, epoch), worker in self.workers.items():
            worker.sent.clear()
            worker.heard.clear()
            worker.holdings.lost()
            self.server.introduce((slot, epoch))
            if self.random.random() < 0.5:
                self.act(worker)  # without a pool
            worker.holdings.declare(slot, epoch, GEOMETRY)

    def act(self, worker: Worker) -> None:
        held = list(worker.holdings.held)
        match self.random.randrange(12):
            case 0 | 1 if len(worker.texts) < 4:
                mine = range(0, 12, 2) if worker is self.workers[WORKERS[0]] else range(1, 12, 2)
                key = self.random.choice([key for key in mine if key not in worker.texts])
                first = self.random.randrange(2)
                ids = [first, *(self.random.choice([0, 0, 0, 1]) for _ in range(TEXT_SLABS * T))]
                worker.attach(key, tokens(ids), self.window)
            case 2 if worker.texts:
                worker.release(self.random.choice(list(worker.texts)))
            case 3 | 4:
                worker.holdings.want(self.random.randrange(5), self.random.randrange(3))
            case 5 if held and self.damaged < 3 and self.random.random() < 0.1:
                self.damaged += 1
                worker.damage(self.random.choice(held), self.window)
            case _ if held:
                worker.compute(self.random.choice(held))

    def deliver(self, worker_id: tuple[int, int], share: float = 0.7) -> None:
        """Some of what is on the way."""
        worker = self.workers[worker_id]
        worker.sent += worker.holdings.out
        worker.holdings.out.clear()
        while worker.sent and self.random.random() < share:
            self.server.hear(worker_id, worker.sent.popleft(), 0.0)
        self.server.turn(0.0)
        for peer, message in self.server.out:
            self.workers[peer].heard.append(message)
        self.server.out.clear()
        while worker.heard and self.random.random() < share:
            worker.hear(worker.heard.popleft())
        assert not self.server.orders

    def check(self) -> None:
        leased = [slab for worker in self.workers.values() for slab in worker.holdings.leased]
        assert len(set(leased)) == len(leased)
        committed = {slab for worker in self.workers.values() for held in worker.holdings.held.values()
                     for ordinal, slab in held.slabs.items() if ordinal not in hidden(held)}  # fmt: skip
        assert committed.isdisjoint(leased)

    def end(self) -> None:
        """All leave and everything arrives."""
        for worker in self.workers.values():
            for key in list(worker.texts):
                worker.release(key)
        for _ in range(20):
            for id, worker in self.workers.items():
                self.deliver(id, 1.0)
                worker.holdings.want(0, 0)
                self.deliver(id, 1.0)
        counts = self.server.pool.counts()
        assert (counts["leased"], counts["committed"]) == (0, 0)
        assert counts["quarantined"] <= self.damaged
        check(self.server.pool)


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([0, 3, 5]))
def test_nothing_is_lost_and_nobody_at_fault(seed: int, window: int) -> None:
    random = Random(seed)
    world = World(random, window)
    for _ in range(300):
        id = random.choice(WORKERS)
        world.act(world.workers[id])
        if random.random() < 0.5:
            world.deliver(id)
        if random.random() < 0.02:
            world.start(WORKERS)
        world.check()
    world.end()
