"""The pool's core: who has which slab. Verbs of workers, of the dispatcher and of the supervisor, one method each.

No I/O and no clock: ``now`` is monotonic seconds. Each verb either does all it says or raises PeerFault and changes
nothing; it is then the caller's to end that peer, and its slabs return by worker_dead(), once it is reaped. ``woken``
are answers to attaches that waited, each for the worker that it names.

Slabs (slabs.State): alloc FREE → LEASED (by eviction: CACHED → FREE before), give LEASED → FREE, commit LEASED →
COMMITTED, the last holder's end COMMITTED → CACHED or, if no attach could find it, FREE; attach CACHED → COMMITTED.
After the pool's own death it is made again by restore(), which see.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from . import recovery
from .counters import Counters
from .journal import Entry, Journal
from .messages import TOKEN, U32, Attached, Committed, Held, PeerFault, Request, Waiting, WorkerId, whole
from .pending import Pending
from .policies import POLICIES
from .policies.pinned_window import hidden_after, longest_hit, view
from .prefix import HASH_BITS, Node, PrefixIndex
from .sequences import Sequence, Waiter, Worker
from .slabs import Slab, SlabTable, State

GHOSTS_PER_SLAB = 4  # nodes without a slab: 0.5 kB each, and T tokens
DROPPED_KEYS = 4096  # remembered, since a drop may overtake the attach of a worker that is dead already


@dataclass(slots=True)
class _Hit:
    """A request can go on behind ``count`` slabs. node: contents of the last one, or the root; None: not known."""

    count: int
    slabs: list[Slab | None]  # by ordinal
    node: Node | None
    hole: bool  # more is resident than can be used


class Pool:
    """slabs: how many; slab_tokens: T. policy: a name in POLICIES. identity: whatever decides what a slab's bytes mean.
    journal: None for one that ends with the process. hash_bits, ghosts: smaller in tests."""

    def __init__(
        self,
        slabs: int,
        slab_tokens: int,
        policy: str,
        identity: bytes,
        journal: Journal | None = None,
        hash_bits: int = HASH_BITS,
        ghosts: int | None = None,
    ) -> None:
        self._start(slabs, slab_tokens, policy, identity, journal, hash_bits, ghosts)
        self.journal.format()

    @classmethod
    def restore(
        cls,
        slabs: int,
        slab_tokens: int,
        policy: str,
        identity: bytes,
        journal: Journal,
        workers: Collection[WorkerId],
        now: float,
        hash_bits: int = HASH_BITS,
        ghosts: int | None = None,
    ) -> Pool:
        """The pool as the journal of a dead one knows it. workers: those that live and may have slabs; until each has
        declared what it has, or is dead, the pool is ``settling``: all verbs work, but alloc gives nothing. An empty
        ``workers`` is a full restart. A journal that is not ours gives an empty pool."""
        pool = cls.__new__(cls)
        pool._start(slabs, slab_tokens, policy, identity, journal, hash_bits, ghosts)
        pool.undeclared = set(workers)
        if journal.is_ours():
            recovery.load(pool, journal.load(), now)
        else:
            journal.format()
        recovery.settle(pool)
        return pool

    def _start(self, slabs: int, slab_tokens: int, policy: str, identity: bytes, journal: Journal | None,
               hash_bits: int, ghosts: int | None) -> None:  # fmt: skip
        self.slab_tokens, self.policy, self.counters = slab_tokens, policy, Counters()
        self.table = SlabTable(slabs, POLICIES[policy])
        most_ghosts = GHOSTS_PER_SLAB * slabs if ghosts is None else ghosts
        self.index = PrefixIndex(identity, slab_tokens, hash_bits, most_ghosts, self.counters)
        self.journal = journal or _own_journal(slabs, slab_tokens, identity)
        self.pending = Pending(slab_tokens)
        self.workers: dict[WorkerId, Worker] = {}
        self.latest: dict[int, Sequence] = {}  # by key: whom an attach of this key takes over from
        self.undeclared: set[WorkerId] = set()
        self.epochs: dict[int, int] = {}  # by slot: the newest that was declared or is dead
        self.faults = 0  # workers that died by a fault signal: the contents of older slabs are suspect
        self._dropped: dict[int, None] = {}

    # ---- workers -----------------------------------------------------------------------------------------------------

    def declare(self, worker: WorkerId, leased: Iterable[int], held: Held, now: float) -> None:
        """A worker's first words. A new worker has nothing. To a restored pool it declares as leased whatever it has
        not sent a commit for, and as held what was attached or what it has sent a commit for, answered or not; after
        this it sends commits and attaches that were not answered once more, in their order."""
        recovery.declare(self, worker, list(leased), held, now)

    def alloc(self, worker: WorkerId, n: int) -> list[int]:
        """Leases up to n slabs, evicting cached ones if there are no free ones. Whatever is missing is the caller's to
        ask for again when ``available`` grows."""
        state, slabs = self._worker(worker), list[int]()
        for _ in range(min(whole(n, U32, "n"), self.available)):
            slab = self._free_slab()
            self.table.move(slab, State.LEASED)
            slab.worker = worker
            slabs.append(slab.number)
        state.leased.update(slabs)
        return slabs

    def give(self, worker: WorkerId, slabs: list[int]) -> None:
        """Leased slabs back."""
        state = self._worker(worker)
        if len(set(slabs)) != len(slabs) or not state.leased.issuperset(slabs):
            raise PeerFault(f"{slabs} given back by {worker}, of which not all are leased to it")
        for number in slabs:
            self._end_lease(state, self.table[number])

    def attach(self, worker: WorkerId, key: int, request: Request, now: float) -> Attached | Waiting:
        """Opens request ``key`` in this worker, behind as much of its tokens as is resident. What it has in another
        worker, dead or about to let it go, is taken over."""
        state = self._worker(worker)
        if key in state.sequences or key in state.waiters:
            raise PeerFault(f"request {key} attached by {worker}, which has it")
        whole(key, 1 << 64, "key")
        return self._answer(Waiter(worker, key, request), now) or Waiting(worker, key)

    def commit(
        self, worker: WorkerId, key: int, ordinal: int, slab: int, tokens: bytes, crc: int, now: float
    ) -> Committed:
        """A leased slab is full: it holds request ``key``'s tokens from ordinal * T on, and will not change."""
        state = self._worker(worker)
        sequence = self._sequence(state, key)
        self._check_commit(state, sequence, ordinal, slab, tokens, crc)
        if ordinal in sequence.redo:
            recovery.commit_again(self, sequence, ordinal, self.table[slab], tokens, crc, now)
        else:
            state.leased.remove(slab)
            self.table[slab].worker = None
            self.table.move(self.table[slab], State.COMMITTED)
            self.take(sequence, ordinal, self.table[slab], now)
            self.record(sequence, ordinal, self.table[slab], tokens, crc, sequence.node, now)
            self._move_on(sequence, ordinal, self.table[slab])
        released = self._give_back(sequence, ordinal, now)
        return Committed(released, self._wake(self._served(sequence, ordinal), now))

    def release(self, worker: WorkerId, key: int, now: float) -> list[Attached]:
        """The request has left this worker, or waits no more. Returns woken."""
        state = self._worker(worker)
        if waiter := state.waiters.pop(key, None):
            _forget(waiter)
            return []
        sequence = self._sequence(state, key)
        del state.sequences[key]
        self._end(sequence, now)
        return self._wake(sequence.waiters, now)

    def bad(self, worker: WorkerId, slab: int) -> None:
        """Its contents do not match its CRC. Every holder loses it; each is to find that out by itself, from an
        Attached or to_verify(), and to attach again. Ignored unless worker holds it: a message about a slab that it
        has just given back may come late."""
        state, entry = self._worker(worker), self.table[whole(slab, self.table.count, "slab")]
        if not any(slab in sequence.slabs.values() for sequence in state.sequences.values()):
            return
        for sequence in self.sequences():
            for ordinal in [o for o, held in sequence.slabs.items() if held == slab]:
                del sequence.slabs[ordinal]
        self._forget_contents(entry)
        self.table.move(entry, State.QUARANTINED)
        self.journal.write(Entry(slab, quarantined=True))
        self.counters.kv_quarantined += 1

    def to_verify(self, worker: WorkerId) -> list[tuple[int, int]]:
        """[slab, CRC] of all that the worker's requests hold: to be checked once after another's death by fault."""
        held = {slab for sequence in self._worker(worker).sequences.values() for slab in sequence.slabs.values()}
        return [(slab, self.table[slab].crc) for slab in sorted(held) if self.table[slab].node is not None]

    # ---- supervisor and dispatcher -----------------------------------------------------------------------------------

    def worker_dead(self, worker: WorkerId, fault: bool, now: float) -> list[Attached]:
        """Its process is reaped; fault: by a signal that makes the arena suspect. Its leases are free. Its requests
        keep their committed slabs until another worker attaches them or they are dropped. Returns woken."""
        slot, epoch = worker
        self.epochs[slot] = max(epoch, self.epochs.get(slot, epoch))
        self.faults += fault
        woken: dict[Waiter, None] = {}
        if state := self.workers.pop(worker, None):
            for number in list(state.leased):
                self._end_lease(state, self.table[number])
                self.counters.kv_leases_reclaimed["worker_death"] += 1
            for waiter in state.waiters.values():
                _forget(waiter)
            for sequence in state.sequences.values():
                self._orphan(sequence, now)
                woken |= sequence.waiters
        self.undeclared.discard(worker)
        recovery.settle(self)
        return self._wake(woken, now)

    def drop(self, key: int, now: float) -> None:
        """The dispatcher is done with the request. Whatever worker still has it will let it go, alive or dead."""
        sequence = self.latest.get(key)
        if sequence is not None:
            sequence.dropped = True
        if sequence is not None and sequence.worker is None:
            self.counters.kv_leases_reclaimed["abort"] += len(sequence.slabs)
            self._end(sequence, now)
        elif sequence is None:
            self._dropped[key] = None
            if len(self._dropped) > DROPPED_KEYS:
                del self._dropped[next(iter(self._dropped))]

    def dispatcher_dead(self, now: float) -> None:
        """Drops all requests: another dispatcher's keys mean others."""
        for key in list(self.latest):
            self.drop(key, now)
        self._dropped.clear()

    def lookup(self, request: Request) -> int:
        """Tokens that an attach would find now. Changes nothing."""
        return self._find(request, None).count * self.slab_tokens

    # ---- numbers -----------------------------------------------------------------------------------------------------

    @property
    def settling(self) -> bool:
        return bool(self.undeclared)

    @property
    def available(self) -> int:
        """Slabs that alloc can lease."""
        counts = self.table.counts
        return 0 if self.undeclared else counts[State.FREE] + counts[State.CACHED]

    def counts(self) -> dict[str, int]:
        """Slabs by state; they add up to all there are."""
        return {state.value: count for state, count in self.table.counts.items()}

    def leases(self) -> dict[WorkerId, int]:
        return {worker: len(state.leased) for worker, state in self.workers.items()}

    def sequences(self) -> list[Sequence]:
        """All that may hold slabs."""
        orphans = [sequence for sequence in self.latest.values() if sequence.worker is None]
        return orphans + [sequence for state in self.workers.values() for sequence in state.sequences.values()]

    # ---- attach ------------------------------------------------------------------------------------------------------

    def _answer(self, waiter: Waiter, now: float) -> Attached | None:
        """None: it waits."""
        hit = self._find(waiter.request, waiter.key)
        if waiter.request.use and self.pending.wait(waiter, hit.node, hit.count):
            self.workers[waiter.worker].waiters[waiter.key] = waiter
            return None
        return self._open(waiter, hit, now)

    def _find(self, request: Request, key: int | None) -> _Hit:
        size, most = self.slab_tokens, request.limit // self.slab_tokens
        path: list[Node] = []
        if request.use:
            path = self.index.walk(request.salt, request.tokens, most, request.full_slabs(size), request.mask)
        slabs = [None if node.slab is None else self.table[node.slab] for node in path[1:]]
        previous = self.latest.get(key) if key is not None else None
        if previous is not None and not previous.dropped and previous.request.same_content(request):
            self._add_own(previous, request, most, slabs)
        count = longest_hit(slabs, request.pinned, request.window, size)
        if count < len(path):
            node: Node | None = path[count]
        else:
            last = slabs[count - 1] if count else None
            node = last.node if last else None
        return _Hit(count, slabs, node, any(slabs[count:]))

    def _add_own(self, previous: Sequence, request: Request, most: int, slabs: list[Slab | None]) -> None:
        """What the request holds already counts as resident even if it is not indexed; its place is known by the key
        and the ordinal, its tokens are compared."""
        step = self.slab_tokens * TOKEN
        for ordinal, number in previous.slabs.items():
            own = self.table[number]
            chunk = request.tokens[ordinal * step : (ordinal + 1) * step]
            if ordinal < most and own.node is not None and own.ordinal == ordinal and own.node.tokens == chunk:
                slabs.extend([None] * (ordinal + 1 - len(slabs)))
                slabs[ordinal] = slabs[ordinal] or own

    def _open(self, waiter: Waiter, hit: _Hit, now: float) -> Attached:
        request, key = waiter.request, waiter.key
        node = hit.node or (self.index.root(request.salt) if request.use and not hit.count else None)
        sequence = Sequence(key, waiter.worker, request, self.slab_tokens, hit.count, node)
        if node is not None:
            self.index.hold(node)
        sequence.dropped = key in self._dropped
        seen: list[tuple[int, int, int | None]] = []
        first, second = view(hit.count, request.pinned, request.window, self.slab_tokens)
        for ordinal in [*range(min(first, second)), *range(second, hit.count)]:
            slab = hit.slabs[ordinal]
            assert slab is not None  # by longest_hit()
            suspect = slab.checked < self.faults
            self.take(sequence, ordinal, slab, now)
            seen.append((ordinal, slab.number, slab.crc if suspect else None))
            if suspect:
                sequence.to_check.append(slab.number)
        self._succeed(sequence, now)
        self._count(request, hit)
        return Attached(waiter.worker, key, hit.count * self.slab_tokens, seen)

    def _succeed(self, sequence: Sequence, now: float) -> None:
        """The sequence is its key's latest; an orphan before it ends, now that what it shares has a second holder."""
        previous = self.latest.get(sequence.key)
        if previous is not None and previous.worker is None:
            self._end(previous, now)
        self.enlist(sequence)

    def enlist(self, sequence: Sequence) -> None:
        assert sequence.worker is not None  # noqa: S101
        self.latest[sequence.key] = self.workers[sequence.worker].sequences[sequence.key] = sequence
        self.pending.put(sequence)

    def _count(self, request: Request, hit: _Hit) -> None:
        if request.use:
            self.counters.prefix_cache_queries += len(request.tokens) // TOKEN
            self.counters.prefix_cache_hits += hit.count * self.slab_tokens
            self.counters.prefix_cache_rejects["hole"] += hit.hole
