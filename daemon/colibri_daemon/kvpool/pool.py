"""The pool's core: who has which slab. Verbs of workers, of the dispatcher and of the supervisor, one method each.

No I/O and no clock: ``now`` is monotonic seconds. Each verb either does all it says or raises PeerFault and changes
nothing; it is then the caller's to end that peer, and its slabs return by worker_dead(), once it is reaped. ``woken``
are answers to attaches that waited, each for the worker that it names.

Slabs (slabs.State): alloc FREE → LEASED (by eviction: CACHED → FREE before), give LEASED → FREE, commit LEASED →
COMMITTED, the last holder's end COMMITTED → CACHED or, if no attach could find it, FREE; attach CACHED → COMMITTED.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from ..common.counters import Counters
from ..common.metrics import Source
from . import recovery
from .journal import Journal
from .ledger import Ledger
from .messages import TOKEN, U32, U64, Attached, Committed, Held, PeerFault, Request, Waiting, WorkerId, whole
from .pending import Pending
from .policies.pinned_window import hidden_after, view
from .prefix import HASH_BITS
from .search import Hit, find
from .sequences import Sequence, Waiter, Worker
from .slabs import State
from .withheld import withhold

DROPPED_KEYS = 4096  # remembered, since a drop may overtake the attach of a worker that is dead by now
DEAD_WORKERS = 1024  # remembered


class Pool:
    """slabs: how many; slab_tokens: T. policy: a name in POLICIES. identity: whatever decides what a slab's bytes mean:
    model id, fingerprint, KV format. hash_bits, ghosts: for tests.

    journal: what an earlier pool with the same identity and geometry left there is known again; None for a pool that
    ends with the process. usable: how many of the slabs may be used at first (withheld.py). workers: those that live
    and may have slabs of the earlier pool. Until each has declared what it has, or is dead, the pool is ``settling``:
    all verbs work, but alloc gives nothing."""

    def __init__(self, slabs: int, slab_tokens: int, policy: str, identity: bytes, journal: Journal | None = None,
                 workers: Collection[WorkerId] = (), now: float = 0.0, hash_bits: int = HASH_BITS,
                 ghosts: int | None = None, usable: int | None = None,
                 counters: Counters | None = None) -> None:  # fmt: skip
        self.ledger = Ledger(slabs, slab_tokens, policy, identity, journal, hash_bits, ghosts,
                             counters or Counters.private(Source.KVPOOL))
        self.pending = Pending(slab_tokens)
        self.workers: dict[WorkerId, Worker] = {}
        self.latest: dict[int, Sequence] = {}  # by key: whom an attach of this key takes over from
        self.undeclared: set[WorkerId] = set(workers)
        self.dead: dict[WorkerId, None] = {}  # the last ones
        self.retired = False  # as in withheld.py
        self._dropped: dict[int, None] = {}
        recovery.load(self.ledger, now)
        withhold(self.ledger.table, slabs if usable is None else usable)
        recovery.settle(self, now)

    # ---- workers -----------------------------------------------------------------------------------------------------

    def declare(self, worker: WorkerId, leased: Iterable[Any], held: Held, now: float) -> None:
        """A worker's first words. A slot may have two for a while, of different epochs: a reload starts new ones while
        the old ones finish. A new worker has nothing. To a new pool it declares as leased whatever it has sent
        no commit for, and as held what was attached or what it has sent a commit for, answered or not; behind
        this it sends once more the commits, attaches and allocs that were not answered, in their order."""
        recovery.declare(self, worker, list(leased), held, now)

    def alloc(self, worker: WorkerId, n: int) -> list[int]:
        """Leases up to n slabs, evicting cached ones if there are no free ones. What is missing is the caller's to ask
        for again when ``available`` grows."""
        state = self._worker(worker)
        return [self.ledger.lease(state) for _ in range(min(whole(n, U32, "n"), self.available))]

    def give(self, worker: WorkerId, slabs: Iterable[Any]) -> None:
        """Leased slabs back."""
        state = self._worker(worker)
        given = [self._number(slab) for slab in slabs]
        if len(set(given)) != len(given) or not state.leased.issuperset(given):
            raise PeerFault(f"{given} given back by {worker}: not all leased to it, or one twice")
        for number in given:
            self.ledger.end_lease(state, number, State.FREE)

    def attach(self, worker: WorkerId, key: int, request: Request, now: float) -> Attached | Waiting:
        """Opens the request in this worker, behind as much of its tokens as is resident. What it has in another worker,
        dead or about to let it go, is taken over."""
        state = self._worker(worker)
        if whole(key, U64, "key") in state.sequences or key in state.waiters:
            raise PeerFault(f"request {key} attached by {worker}, which has it")
        return self._answer(Waiter(worker, key, request), now) or Waiting(worker, key)

    def has_elsewhere(self, worker: WorkerId, key: Any) -> bool:
        """Whether another worker, which lives, has this request and has not let it go yet."""
        latest = self.latest.get(key) if type(key) is int else None
        return latest is not None and not latest.dropped and latest.worker not in (None, worker)

    def commit(self, worker: WorkerId, key: int, ordinal: int, slab: int, tokens: bytes, crc: int,
               now: float) -> Committed:  # fmt: skip
        """A leased slab is full: it holds the request's tokens from ordinal * T on, and will not change."""
        state = self._worker(worker)
        sequence = self._sequence(state, key)
        self._check_commit(state, sequence, ordinal, slab, tokens, crc)
        if ordinal in sequence.redo:
            sequence.redo.remove(ordinal)
            if not state.verifying:
                recovery.commit_again(self.ledger, sequence, ordinal, tokens, crc, now)
        else:
            entry = self.ledger.end_lease(state, slab, State.COMMITTED)
            self.ledger.take(sequence, ordinal, entry, now)
            if not state.verifying:
                self.ledger.record(entry, sequence, ordinal, tokens, crc, sequence.node, now)
            self._advance(sequence)
        released = self._give_back(sequence, ordinal, now)
        return Committed(released, self._wake(_served(sequence), now))

    def release(self, worker: WorkerId, key: int, now: float) -> list[Attached]:
        """The request has left this worker, or waits no more. Returns woken."""
        state = self._worker(worker)
        if whole(key, U64, "key") in state.waiters:
            self._stop_waiting(state.waiters[key])
            return []
        sequence = self._sequence(state, key)
        del state.sequences[key]
        self._end(sequence, now)
        return self._wake(list(sequence.waiters), now)

    def bad(self, worker: WorkerId, slab: int) -> None:
        """The slab's contents do not match its CRC. Every holder loses it; each is to find that out by itself, from
        Attached or to_verify(), to release its request and attach it again. Ignored unless a request of this worker
        holds it: it may be about a slab that was given back meanwhile."""
        state, number = self._worker(worker), self._number(slab)
        if not any(number in sequence.slabs.values() for sequence in state.sequences.values()):
            return
        for sequence in self.sequences():
            for ordinal in [o for o, held in sequence.slabs.items() if held == number]:
                del sequence.slabs[ordinal]
        self.ledger.quarantine(self.ledger.table[number])
        self.counters.add("kv_quarantined_total")

    def to_verify(self, worker: WorkerId) -> list[tuple[int, int | None]]:
        """(slab, CRC) of all that the worker's requests hold, after suspect(): to be checked once. None: not to be used
        again. Until verified() its commits count for nothing: they may have been on their way before it heard of it."""
        state, table = self._worker(worker), self.ledger.table
        state.verifying += 1
        held = sorted({slab for sequence in state.sequences.values() for slab in sequence.slabs.values()})
        return [(number, table[number].crc if table[number].node is not None else None) for number in held]

    def verified(self, worker: WorkerId) -> None:
        """It has checked what it was told to, and computes again whatever it had not sent a commit for."""
        state = self._worker(worker)
        if not state.verifying:
            raise PeerFault(f"{worker} has verified what it was not told to")
        state.verifying -= 1

    # ---- supervisor and dispatcher -----------------------------------------------------------------------------------

    def suspect(self, since: float) -> None:
        """A worker died by a fault, and may have written over anything from then on. Damage to what was committed
        before shows in its CRC; it is given with every attach until it was checked once. What was committed later may
        be computed from damage, and its CRC be right all the same: it counts as not computed. To be called before
        worker_dead(), and each other worker is to be told to_verify()."""
        self.ledger.faults += 1
        for slab in self.ledger.table.all:
            if slab.node is not None and slab.committed >= since:
                self.ledger.doubt(slab)

    def worker_dead(self, worker: WorkerId, now: float) -> list[Attached]:
        """Its process is reaped. Its leases are free. Its requests keep their committed slabs until another worker
        attaches them or they are dropped. Returns woken."""
        self.dead[worker] = None
        if len(self.dead) > DEAD_WORKERS:
            del self.dead[next(iter(self.dead))]
        woken = self._bury(state, now) if (state := self.workers.pop(worker, None)) else []
        if worker in self.undeclared:
            self.undeclared.remove(worker)
            recovery.settle(self, now)
        return self._wake(woken, now)

    def worker_killed(self, worker: WorkerId, now: float) -> list[Attached]:
        """It says nothing any more, but may still write to what is leased to it: as worker_dead(), which follows, but
        for its leases. Nothing happens if it has not declared what it has, or is dead. Returns woken."""
        state = self.workers.get(worker)
        return self._wake(self._orphan(state, now), now) if state is not None else []

    def drop(self, key: int, now: float) -> None:
        """The dispatcher is done with the request. A worker that still has it will release it, or die. Drops are not
        journaled: the dispatcher sends its last ones, up to DROPPED_KEYS, to a new pool again."""
        self._dropped[key] = None
        if len(self._dropped) > DROPPED_KEYS:
            del self._dropped[next(iter(self._dropped))]
        sequence = self.latest.get(key)
        if sequence is None:
            return
        sequence.dropped = True
        if sequence.worker is None:
            self.counters.add("kv_leases_reclaimed_total", len(sequence.slabs), reason="abort")
            self._end(sequence, now)

    def dispatcher_dead(self, now: float) -> None:
        """Drops all requests: another dispatcher's keys mean others."""
        for key in list(self.latest):
            self.drop(key, now)
        self._dropped.clear()

    def evict(self, owner: bytes | None) -> int:
        """Whatever has a salt that begins with owner, or anything, is found no more; what nobody holds of it is free
        now. How many slabs. Owners of what another pool process left are known once they ask for something of it; until
        then it counts as anybody's."""
        table, index = self.ledger.table, self.ledger.index
        index.cut_roots(owner)
        lost = [s for s in table.all if s.state is State.CACHED and s.node is not None and index.is_lost(s.node)]
        return self.ledger.evict(lost, "admin")

    def lookup(self, request: Request) -> int:
        """Tokens that an attach would find now. Takes nothing."""
        return find(self.ledger, request, None).count * self.ledger.slab_tokens

    # ---- numbers -----------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        return self.ledger.counters

    @property
    def settling(self) -> bool:
        return bool(self.undeclared)

    @property
    def available(self) -> int:
        """Slabs that alloc can lease."""
        counts = self.ledger.table.counts
        spare = counts[State.FREE] + counts[State.CACHED] + (counts[State.WITHHELD] if self.retired else 0)
        return 0 if self.undeclared else spare

    def counts(self) -> dict[str, int]:
        """Slabs by state; they add up to all there are."""
        return {state.value: count for state, count in self.ledger.table.counts.items()}

    def leases(self) -> dict[WorkerId, int]:
        return {worker: len(state.leased) for worker, state in self.workers.items()}

    def sequences(self) -> list[Sequence]:
        """All that hold slabs."""
        orphans = [sequence for sequence in self.latest.values() if sequence.worker is None]
        return orphans + [sequence for state in self.workers.values() for sequence in state.sequences.values()]

    # ---- attach ------------------------------------------------------------------------------------------------------

    def _answer(self, waiter: Waiter, now: float) -> Attached | None:
        """None: it waits."""
        hit = find(self.ledger, waiter.request, self.latest.get(waiter.key))
        if waiter.request.use and self.pending.wait(waiter, hit.node, hit.count):
            self.workers[waiter.worker].waiters[waiter.key] = waiter
            return None
        return self._open(waiter, hit, now)

    def _open(self, waiter: Waiter, hit: Hit, now: float) -> Attached:
        request, ledger = waiter.request, self.ledger
        sequence = Sequence(waiter.key, waiter.worker, request, ledger.slab_tokens, hit.count, faults=ledger.faults)
        is_first = hit.node is None and not hit.count and request.use  # with this salt
        ledger.set_end(sequence, ledger.index.root(request.salt) if is_first else hit.node)
        seen: list[tuple[int, int, int | None]] = []
        first, second = view(hit.count, request.pinned, request.window, ledger.slab_tokens)
        for ordinal in [*range(min(first, second)), *range(second, hit.count)]:
            slab = hit.slabs[ordinal]
            assert slab is not None  # or it were no hit
            seen.append((ordinal, slab.number, slab.crc if request.verify or slab.checked < ledger.faults else None))
            ledger.take(sequence, ordinal, slab, now)
        sequence.to_check = [number for _, number, crc in seen if crc is not None]
        self.enlist(sequence, now)
        if request.use:
            self.counters.add("prefix_cache_queries_total", len(request.tokens) // TOKEN)
            self.counters.add("prefix_cache_hits_total", hit.count * ledger.slab_tokens)
            self.counters.add("prefix_cache_rejects_total", hit.has_hole, reason="hole")
        return Attached(waiter.worker, waiter.key, hit.count * ledger.slab_tokens, seen)

    def enlist(self, sequence: Sequence, now: float) -> None:
        """The sequence is its key's latest. An orphan before it ends: what both share has a second holder by now."""
        previous = self.latest.get(sequence.key)
        if previous is not None and previous.worker is None:
            self._end(previous, now)
        self.latest[sequence.key] = sequence
        sequence.dropped = sequence.key in self._dropped
        if sequence.worker is not None:
            self.workers[sequence.worker].sequences[sequence.key] = sequence
        self.pending.put(sequence)

    def _stop_waiting(self, waiter: Waiter) -> None:
        del self.workers[waiter.worker].waiters[waiter.key]
        if waiter.owner is not None:
            del waiter.owner.waiters[waiter]
        waiter.owner = None

    def _wake(self, waiters: list[Waiter], now: float) -> list[Attached]:
        """Answers those that need not wait any longer, in the order in which they came."""
        for waiter in waiters:
            self._stop_waiting(waiter)
        answers = [self._answer(waiter, now) for waiter in waiters]
        return [answer for answer in answers if answer is not None]

    # ---- commit ------------------------------------------------------------------------------------------------------

    def _check_commit(self, worker: Worker, sequence: Sequence, ordinal: int, slab: int, tokens: bytes,
                      crc: int) -> None:  # fmt: skip
        whole(ordinal, U32, "ordinal")
        whole(crc, U32, "crc")
        number = self._number(slab)
        if type(tokens) is not bytes or len(tokens) != self.ledger.slab_tokens * TOKEN:
            raise PeerFault(f"slab {number} committed with tokens that are not {self.ledger.slab_tokens} ids")
        if sequence.known(ordinal) not in (None, tokens):
            raise PeerFault(f"slab {number} committed with other tokens than request {sequence.key} has")
        if ordinal in sequence.redo:
            recovery.check_again(self.ledger, sequence, ordinal, number, tokens, crc)
        elif ordinal != sequence.next:
            raise PeerFault(f"slab {ordinal} of request {sequence.key} committed, not {sequence.next}")
        elif number not in worker.leased:
            raise PeerFault(f"slab {number} committed, but not leased to {worker.id}")

    def _advance(self, sequence: Sequence) -> None:
        """Its next slab is committed."""
        slab = self.ledger.table[sequence.slabs[sequence.next]]
        self.pending.remove(sequence)
        self.ledger.set_end(sequence, slab.node)
        sequence.next += 1
        self.pending.put(sequence)
        for number in sequence.to_check:
            checked = self.ledger.table[number]
            checked.checked = max(checked.checked, sequence.faults)
        sequence.to_check = []

    def _give_back(self, sequence: Sequence, ordinal: int, now: float) -> list[int]:
        """Ordinals that the sequence has given back."""
        request = sequence.request
        hidden = hidden_after(ordinal, request.pinned, request.window, self.ledger.slab_tokens)
        gone = [o for o in range(max(hidden.start, sequence.given_back), hidden.stop) if o in sequence.slabs]
        for number in [sequence.slabs.pop(o) for o in gone]:
            self.ledger.let_go(number, now)
        sequence.given_back = max(sequence.given_back, hidden.stop)
        self.counters.add("kv_evictions_total", len(gone), reason="window")
        return gone

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, now: float) -> None:
        self.pending.remove(sequence)
        if self.latest.get(sequence.key) is sequence:
            del self.latest[sequence.key]
        for number in sequence.slabs.values():
            self.ledger.let_go(number, now)
        sequence.slabs = {}
        self.ledger.set_end(sequence, None)

    def _bury(self, worker: Worker, now: float) -> list[Waiter]:
        """Returns whom its requests let wait."""
        for number in list(worker.leased):
            self.ledger.end_lease(worker, number, State.FREE)
            self.counters.add("kv_leases_reclaimed_total", reason="worker_death")
        return self._orphan(worker, now)

    def _orphan(self, worker: Worker, now: float) -> list[Waiter]:
        """Its requests have no worker any more. Returns whom they let wait."""
        for waiter in list(worker.waiters.values()):
            assert waiter.owner is not None
            del waiter.owner.waiters[waiter]
        sequences, worker.sequences, worker.waiters = list(worker.sequences.values()), {}, {}
        for sequence in sequences:
            self.pending.remove(sequence)
            sequence.worker = None
            if sequence.dropped or self.latest.get(sequence.key) is not sequence:
                self._end(sequence, now)
        return [waiter for sequence in sequences for waiter in sequence.waiters]

    # ---- peers -------------------------------------------------------------------------------------------------------

    def _worker(self, worker: WorkerId) -> Worker:
        state = self.workers.get(worker)
        if state is None:
            raise PeerFault(f"worker {worker} has not said hello, or is dead")
        return state

    def _sequence(self, worker: Worker, key: int) -> Sequence:
        sequence = worker.sequences.get(whole(key, U64, "key"))
        if sequence is None:
            raise PeerFault(f"request {key} is not attached by {worker.id}")
        return sequence

    def _number(self, slab: Any) -> int:
        return whole(slab, self.ledger.table.count, "slab")


def _served(sequence: Sequence) -> list[Waiter]:
    """Whom a commit of this sequence lets go on: all, if its slabs cannot be found any more."""
    findable = sequence.node is not None and sequence.node.indexed
    return [waiter for waiter in sequence.waiters if not findable or waiter.target < sequence.next]
