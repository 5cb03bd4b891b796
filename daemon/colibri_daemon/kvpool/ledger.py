"""Slabs, what they hold and who holds them: the steps of which pool.py's verbs are made. Nothing here can fail."""

from __future__ import annotations

from collections.abc import Iterable

from ..common.counters import Counters
from .journal import Entry, Journal
from .policies import POLICIES
from .prefix import Node, PrefixIndex
from .sequences import Sequence, Worker
from .slabs import Slab, SlabTable, State

GHOSTS_PER_SLAB = 4  # nodes without a slab: 0.5 kB each, and T tokens


class Ledger:
    def __init__(self, slabs: int, slab_tokens: int, policy: str, identity: bytes, journal: Journal | None,
                 hash_bits: int, ghosts: int | None, counters: Counters) -> None:  # fmt: skip
        self.slab_tokens, self.policy, self.counters = slab_tokens, policy, counters
        self._lifetime = counters.histogram("kv_block_lifetime_seconds")
        self._idle = counters.histogram("kv_block_idle_before_evict_seconds")
        self._reuse = counters.histogram("kv_block_reuse_gap_seconds")
        self._now = 0.0  # when a slab was last taken or let go
        self.table = SlabTable(slabs, POLICIES[policy])
        most_ghosts = GHOSTS_PER_SLAB * slabs if ghosts is None else ghosts
        self.index = PrefixIndex(identity, slab_tokens, hash_bits, most_ghosts, self.counters)
        self.journal = journal or _own_journal(slabs, slab_tokens, identity)
        self.faults = 0  # workers that died by a fault signal: what was written before is suspect

    # ---- leases ------------------------------------------------------------------------------------------------------

    def lease(self, worker: Worker) -> int:
        """One of the free or cached slabs, or of the withheld ones if there is no other; there must be one."""
        table = self.table
        if table.free:
            slab = table.next_free()
        elif table.counts[State.CACHED]:
            slab = table.worst()
            self._evict(slab)
            self.counters.add("kv_evictions_total", reason=self.policy)
        else:
            slab = table[next(iter(table.withheld))]
        self.lease_this(worker, slab)
        return slab.number

    def lease_this(self, worker: Worker, slab: Slab) -> None:
        self.table.move(slab, State.LEASED)
        slab.worker = worker.id
        worker.leased.add(slab.number)

    def end_lease(self, worker: Worker, number: int, state: State) -> Slab:
        slab = self.table[number]
        worker.leased.remove(number)
        slab.worker = None
        self.table.move(slab, state)
        return slab

    # ---- holds -------------------------------------------------------------------------------------------------------

    def take(self, sequence: Sequence, ordinal: int, slab: Slab, now: float) -> None:
        """The sequence holds the slab, which is not leased."""
        if slab.state is State.CACHED:
            self._reuse.observe(now - slab.last_use)
        if slab.state is not State.COMMITTED:
            self.table.move(slab, State.COMMITTED)
        sequence.slabs[ordinal] = slab.number
        slab.holders += 1
        slab.uses += 1
        slab.last_use = self._now = now

    def let_go(self, number: int, now: float) -> None:
        """One hold less, taken out of its sequence before. A slab without any is cached if an attach could find it."""
        slab = self.table[number]
        slab.holders -= 1
        slab.last_use = self._now = now
        if not slab.holders:
            self.settle(slab, now)

    def settle(self, slab: Slab, now: float) -> None:
        """Nobody holds it: cached or free."""
        if self.is_findable(slab):
            self.table.cache(slab, now)
        else:
            self.free(slab)

    def is_findable(self, slab: Slab) -> bool:
        return slab.node is not None and slab.node.indexed and slab.node.slab == slab.number

    def free(self, slab: Slab) -> None:
        self.forget(slab)
        self.table.move(slab, State.FREE)

    def quarantine(self, slab: Slab) -> None:
        """Nobody holds it any more. What is behind it may be made of the damage: nothing finds it again."""
        if slab.node is not None and slab.node.indexed:
            self._cut(slab.node)
        self.forget(slab)
        self.table.move(slab, State.QUARANTINED)
        self.journal.write(Entry(slab.number, quarantined=True))

    # ---- contents ----------------------------------------------------------------------------------------------------

    def record(self, slab: Slab, sequence: Sequence, ordinal: int, tokens: bytes, crc: int, parent: Node | None,
               now: float) -> None:  # fmt: skip
        """What the sequence has put into the slab, which it holds; parent: contents of the slab before."""
        parent = parent if sequence.request.use else None
        node, displaced = self.index.child(parent, sequence.mask(ordinal), tokens)
        if displaced is not None and self.table[displaced].state is State.CACHED:
            self.free(self.table[displaced])
        self.know(slab, node, ordinal, crc, now)
        slab.checked = self.faults
        above = node.parent
        self.journal.write(
            Entry(slab.number, node.hash, above.hash if above else b"", node.uid, above.uid if above else 0, ordinal,
                  crc, now, node.indexed, node.mask, tokens)
        )  # fmt: skip

    def know(self, slab: Slab, node: Node, ordinal: int, crc: int, committed: float) -> None:
        self.index.fill(node, slab.number)
        slab.node, slab.ordinal, slab.crc, slab.committed = node, ordinal, crc, committed

    def forget(self, slab: Slab) -> None:
        self.disown(slab)
        slab.holders, slab.uses = 0, 0

    def evict(self, slabs: Iterable[Slab], reason: str) -> int:
        """Cached ones; how many."""
        count = 0
        for slab in slabs:
            self._evict(slab)
            count += 1
        self.counters.add("kv_evictions_total", count, reason=reason)
        return count

    def _evict(self, slab: Slab) -> None:
        """A cached one."""
        self._lifetime.observe(max(0.0, self._now - slab.committed))
        self._idle.observe(max(0.0, self._now - slab.last_use))
        self.free(slab)

    def disown(self, slab: Slab) -> None:
        """Nothing is known of its contents any more; who holds it still does."""
        self.journal.erase(slab.number)
        if slab.node is not None:
            self.index.vacate(slab.node, slab.number)
        slab.node = None

    def doubt(self, slab: Slab) -> None:
        """What it holds, and so what is behind it, may be made of damage: nothing finds it again."""
        if slab.node is not None and slab.node.indexed:
            self._cut(slab.node)
        if slab.state is State.COMMITTED:
            self.disown(slab)

    def _cut(self, node: Node) -> None:
        """Out of the tree, with all below."""
        self.index.cut(node)
        if node.slab is not None and self.table[node.slab].state is State.CACHED:
            self.free(self.table[node.slab])

    def set_end(self, sequence: Sequence, node: Node | None) -> None:
        """node: contents of the slab before the sequence's next one."""
        if node is not None:
            self.index.hold(node)
        before, sequence.node = sequence.node, node
        self.index.drop(before)


def _own_journal(slabs: int, slab_tokens: int, identity: bytes) -> Journal:
    return Journal(memoryview(bytearray(Journal.size(slabs, slab_tokens))), slabs, slab_tokens, identity)
