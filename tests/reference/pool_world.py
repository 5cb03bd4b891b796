"""What surrounds the KV pool's core, as a plain model: workers, their requests, the arena. Checks each answer.

The model knows what was written into each slab: (salt, mask, all tokens up to its end). Whatever an attach returns must
hold exactly what the request needs, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from struct import pack
from typing import Any

from colibri_daemon.kvpool.check import check
from colibri_daemon.kvpool.journal import Journal
from colibri_daemon.kvpool.messages import Attached, Request, Waiting, WorkerId
from colibri_daemon.kvpool.pool import Pool
from colibri_daemon.kvpool.slabs import State

T, SLABS = 2, 16
IDENTITY = b"model"
SCRIBBLE = ("scribble",)  # contents of a slab that somebody has, or had, for writing
TAINTED = ("tainted",)  # may have been computed from damage: its CRC is right, and nobody may get it
Holds = dict[int, int]  # ordinal -> slab


@dataclass
class Job:
    """A request as the dispatcher knows it. Its output depends on its tokens alone."""

    key: int
    salt: bytes
    use: bool
    attention: tuple[int, int, str]
    tokens: list[int]

    def grow_to(self, length: int) -> None:
        while len(self.tokens) < length:
            self.tokens.append((sum(self.tokens) + len(self.tokens) // 3) % 2)

    def packed(self, ordinal: int) -> bytes:
        return pack(f"<{T}I", *self.tokens[ordinal * T : ordinal * T + T])

    def request(self) -> Request:
        packed = pack(f"<{len(self.tokens)}I", *self.tokens)
        return Request(packed, self.salt, self.use, *self.attention, len(self.tokens) - 1)

    def content(self, ordinal: int) -> tuple[Any, ...]:
        pinned, window, _ = self.attention
        end = ordinal * T + T
        is_full = not window or end <= pinned + window
        return self.salt, None if is_full else self.attention, tuple(self.tokens[:end])

    def in_view(self, length: int, below: int) -> set[int]:
        """Ordinals of the slabs with a token before ``below`` that a query at length sees."""
        pinned, window, _ = self.attention
        return {t // T for t in range(below) if not window or t < pinned or t > length - window}


@dataclass
class Peer:
    """A worker. next and known: of each request, the ordinal of its next commit and the whole slabs of tokens that were
    known when it was attached."""

    leased: set[int] = field(default_factory=set)
    held: dict[int, Holds] = field(default_factory=dict)
    next: dict[int, int] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    unanswered: tuple[int, int] | None = None  # (key, ordinal) of a commit sent to a pool that died


class World:
    def __init__(self, policy: str, hash_bits: int, ghosts: int) -> None:
        self.memory = bytearray(Journal.size(SLABS, T))
        self.peers: dict[WorkerId, Peer] = {}
        self.silent: list[WorkerId] = []  # lived through the pool's death and have not declared yet
        self.killed: set[WorkerId] = set()  # and not reaped yet
        self.jobs: dict[int, Job] = {}
        self.latest: dict[int, WorkerId] = {}  # by key: who attached it last, until it releases it
        self.dropped: set[int] = set()
        self.orphans: dict[int, Holds] = {}
        self.content: dict[int, tuple[Any, ...]] = {}
        self.findable: set[int] = set()  # slabs written by a request that uses the cache
        self.quarantined: set[int] = set()
        self.committed: dict[int, float] = {}  # when
        self.unverified: set[WorkerId] = set()  # of the silent
        self.now = 0.0
        self.options = {"hash_bits": hash_bits, "ghosts": ghosts}
        self.policy = policy
        self.is_exact = hash_bits == 256 and ghosts > 1000  # no hit is lost; a restart or a quarantine may cost some
        self.pool = self.make_pool([])

    def make_pool(self, workers: Collection[WorkerId]) -> Pool:
        journal = Journal(memoryview(self.memory), SLABS, T, IDENTITY)
        return Pool(SLABS, T, self.policy, IDENTITY, journal, workers, self.now, **self.options)

    # ---- what is there -----------------------------------------------------------------------------------------------

    @property
    def speaking(self) -> list[WorkerId]:
        return [worker for worker in self.peers if worker not in self.killed and worker not in self.silent]

    @property
    def declaring(self) -> list[WorkerId]:
        """Who is about to."""
        return [worker for worker in self.silent if worker not in self.killed]

    @property
    def carried(self) -> list[tuple[WorkerId, int]]:
        return [(worker, key) for worker in self.speaking for key in self.peers[worker].held]

    def has(self, key: int) -> list[WorkerId]:
        return [worker for worker, peer in self.peers.items() if key in peer.held or key in peer.waiting]

    def holds(self) -> list[Holds]:
        return [*self.orphans.values(), *(held for peer in self.peers.values() for held in peer.held.values())]

    def leased(self) -> set[int]:
        return {slab for peer in self.peers.values() for slab in peer.leased}

    # ---- attach ------------------------------------------------------------------------------------------------------

    def attach(self, worker: WorkerId, key: int) -> None:
        best, answer = self.best(key), self.pool.attach(worker, key, self.jobs[key].request(), self.now)
        if isinstance(answer, Waiting):
            assert self.jobs[key].use
            self.peers[worker].waiting.append(key)
        else:
            self.attached(answer, best)

    def attached(self, answer: Attached, best: int) -> None:
        job, peer = self.jobs[answer.key], self.peers[answer.worker]
        assert answer.n % T == 0
        assert answer.n < len(job.tokens)
        assert [ordinal for ordinal, _, _ in answer.slabs] == sorted(job.in_view(answer.n, answer.n))
        for ordinal, slab, crc in answer.slabs:
            assert slab not in self.leased()
            assert self.content[slab] == job.content(ordinal) or (self.content[slab] == SCRIBBLE and crc is not None)
            assert crc in (None, slab)
        if self.is_exact:
            assert answer.n == best * T
            assert not job.use or not self.computing(job, best)
        self.orphans.pop(answer.key, None)
        self.latest[answer.key] = answer.worker
        peer.held[answer.key] = {ordinal: slab for ordinal, slab, _ in answer.slabs}
        peer.next[answer.key], peer.known[answer.key] = answer.n // T, len(job.tokens) // T
        self.report(answer.worker, answer.key, [slab for _, slab, _ in answer.slabs])

    def best(self, key: int) -> int:
        """Most slabs that an attach of key can find; holds of its own count, even those that others cannot find."""
        job, table = self.jobs[key], self.pool.ledger.table
        there = set(self.orphans.get(key, {}).values())
        if self.latest.get(key) in self.peers and key not in self.dropped:
            there |= set(self.peers[self.latest[key]].held[key].values())
        if job.use:
            there |= {n for n in self.findable if table[n].state in (State.COMMITTED, State.CACHED)}
        resident = {self.content[slab] for slab in there}
        most = (len(job.tokens) - 1) // T
        return max(m for m in range(most + 1) if all(job.content(o) in resident for o in job.in_view(m * T, m * T)))

    def computing(self, job: Job, ordinal: int) -> list[int]:
        """Other requests that compute what job needs next, which should wait for them."""
        if (ordinal + 1) * T >= len(job.tokens):
            return []
        return [
            key for peer in self.peers.values() for key in peer.held
            if key != job.key and self.jobs[key].use and peer.next[key] == ordinal < peer.known[key]
            and self.jobs[key].content(ordinal) == job.content(ordinal)
        ]  # fmt: skip

    def woken(self, answers: list[Attached]) -> None:
        for answer in answers:
            self.peers[answer.worker].waiting.remove(answer.key)
        for answer in answers:
            self.attached(answer, self.best(answer.key))

    # ---- commit and release ------------------------------------------------------------------------------------------

    def write(self, worker: WorkerId, key: int, slab: int) -> int:
        """Returns the ordinal, to be committed."""
        peer, job = self.peers[worker], self.jobs[key]
        ordinal = peer.next[key]
        job.grow_to(ordinal * T + T)
        self.content[slab] = job.content(ordinal)
        peer.leased.remove(slab)
        peer.held[key][ordinal] = slab
        peer.next[key] += 1
        return ordinal

    def commit(self, worker: WorkerId, key: int, ordinal: int) -> None:
        held, job = self.peers[worker].held[key], self.jobs[key]
        slab = held[ordinal]
        done = self.pool.commit(worker, key, ordinal, slab, job.packed(ordinal), slab, self.now)
        self.committed[slab] = self.now
        if self.pool.workers[worker].verifying:
            self.content[slab] = TAINTED
        elif job.use:
            self.findable.add(slab)
        assert done.released == sorted(set(held) - job.in_view(ordinal * T, ordinal * T + T))
        for gone in done.released:
            del held[gone]
        self.woken(done.woken)

    def release(self, worker: WorkerId, key: int) -> None:
        peer = self.peers[worker]
        if key in peer.waiting:
            peer.waiting.remove(key)
        else:
            del peer.held[key]
            if self.latest.get(key) == worker:
                del self.latest[key]
        self.woken(self.pool.release(worker, key, self.now))

    # ---- deaths ------------------------------------------------------------------------------------------------------

    def die(self, worker: WorkerId, since: float | None = None) -> None:
        """since: from when on what was written is suspect, after a fault."""
        peer = self.peers.pop(worker)
        self.killed.discard(worker)
        if worker in self.silent:
            self.silent.remove(worker)
        if since is not None:
            self.suspect(since)
        woken = self.pool.worker_dead(worker, self.now)
        self.orphan(worker, peer)
        self.woken(woken)
        for other in self.speaking if since is not None else []:
            told, peer = self.pool.to_verify(other), self.peers[other]
            late = next((key for key in peer.held if peer.leased), None)
            if late is not None:  # a commit was on its way
                self.commit(other, late, self.write(other, late, min(peer.leased)))
            self.verify(other, told, late)

    def kill(self, worker: WorkerId) -> None:
        """It dies later. Who is silent has nothing yet that the pool could give to others."""
        self.killed.add(worker)
        woken = self.pool.worker_killed(worker, self.now)
        if worker in self.silent:
            assert not woken
            return
        peer = self.peers[worker]
        self.orphan(worker, peer)
        self.latest = {key: other for key, other in self.latest.items() if other != worker}
        peer.held, peer.waiting = {}, []
        self.woken(woken)

    def orphan(self, worker: WorkerId, peer: Peer) -> None:
        for key in peer.held:
            if self.latest.get(key) == worker and key not in self.dropped:
                self.orphans[key] = peer.held[key]

    def suspect(self, since: float) -> None:
        self.pool.suspect(since)
        tainted = {slab for slab, when in self.committed.items() if when >= since} - self.leased() - self.quarantined
        self.content |= dict.fromkeys(tainted, TAINTED)
        self.findable -= tainted
        self.unverified = set(self.silent)

    def verify(self, worker: WorkerId, told: list[tuple[int, int | None]], late: int | None) -> None:
        """Requests with a slab that is not to be used, or with a late commit, leave to try again."""
        peer = self.peers[worker]
        assert all(crc in (None, slab) for slab, crc in told)
        lost = {slab for slab, crc in told if crc is None}
        for key in list(peer.held):
            slabs = set(peer.held[key].values())
            if key == late or slabs & lost:
                self.release(worker, key)
            else:
                assert not any(self.content[slab] == TAINTED for slab in slabs)
                self.report(worker, key, [slab for slab, _ in told])
        self.pool.verified(worker)

    def report(self, worker: WorkerId, key: int, slabs: list[int]) -> None:
        """A worker has checked CRCs. A request whose slabs do not match leaves, to try again."""
        held = self.peers[worker].held[key]
        bad = [slab for slab in slabs if slab in held.values() and self.content[slab] == SCRIBBLE]
        for slab in bad:
            self.pool.bad(worker, slab)
            for other in self.holds():
                for ordinal in [o for o, number in other.items() if number == slab]:
                    del other[ordinal]
        self.quarantined |= set(bad)
        self.is_exact = self.is_exact and not bad
        if bad:
            self.release(worker, key)

    def restart_pool(self) -> None:
        self.orphans, self.latest, self.is_exact = {}, {}, False
        self.silent = list(self.peers)
        self.pool = self.make_pool(self.silent)
        for key in self.dropped:
            self.pool.drop(key, self.now)

    def declare(self, worker: WorkerId) -> None:
        """Then sends again what was not answered."""
        peer = self.peers[worker]
        held = {key: (self.jobs[key].request(), sorted(slabs.items())) for key, slabs in peer.held.items()}
        self.pool.declare(worker, peer.leased, held, self.now)
        self.silent.remove(worker)
        self.latest |= dict.fromkeys(peer.held, worker)
        self.orphans = {key: holds for key, holds in self.orphans.items() if key not in peer.held}
        told = self.pool.to_verify(worker) if worker in self.unverified else None
        unanswered, peer.unanswered = peer.unanswered, None
        waiting, peer.waiting = peer.waiting, []
        if unanswered:
            self.commit(worker, *unanswered)
        for key in waiting:
            self.attach(worker, key)
        if told is not None:
            self.unverified.remove(worker)
            self.verify(worker, told, unanswered[0] if unanswered else None)

    # ---- what holds always -------------------------------------------------------------------------------------------

    def check(self) -> None:
        assert not check(self.pool), check(self.pool)
        counts, held = self.pool.counts(), {slab for holds in self.holds() for slab in holds.values()}
        assert sum(counts.values()) == SLABS
        assert counts["quarantined"] == len(self.quarantined)
        if not self.silent:
            assert counts["leased"] == len(self.leased())
            assert counts["committed"] == len(held)
        for worker in self.peers.keys() - self.silent:
            state = self.pool.workers[worker]
            assert state.leased == self.peers[worker].leased
            assert {key: sequence.slabs for key, sequence in state.sequences.items()} == self.peers[worker].held
            assert set(state.waiters) == set(self.peers[worker].waiting)

    def end(self) -> None:
        """When the requests that compute end, all that wait are answered; then nothing is left."""
        for worker in list(self.killed):
            self.die(worker)
        while self.silent:
            self.declare(self.silent[0])
        while self.carried:
            self.release(*self.carried[0])
        assert not any(peer.waiting for peer in self.peers.values())
        for key in list(self.orphans):
            self.pool.drop(key, self.now)
        for worker in list(self.peers):
            self.pool.worker_dead(worker, self.now)
        counts = self.pool.counts()
        assert counts["leased"] == counts["committed"] == 0
        assert not check(self.pool), check(self.pool)
