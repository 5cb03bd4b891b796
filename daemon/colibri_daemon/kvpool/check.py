"""The invariants of a pool. Each violation is a line "kind: what"; the kinds are the labels of the metric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .pool import Pool
from .prefix import Node
from .slabs import Slab, State


def check(pool: Pool) -> list[str]:
    """Violations found; none in a right pool. Looks at everything: milliseconds for thousands of slabs."""
    return [*_states(pool), *_slabs(pool), *_holders(pool), *_nodes(pool), *_waits(pool), *_journal(pool)]


def _states(pool: Pool) -> Iterator[str]:
    table = pool.ledger.table
    if Counter(slab.state for slab in table.all) != Counter({s: n for s, n in table.counts.items() if n}):
        yield f"states: the counts are {pool.counts()}, the states others"
    if {slab.number for slab in table.all if slab.state is State.FREE} != set(table.free):
        yield "states: the free list is not the free slabs"
    if {slab.number for slab in table.all if slab.state is State.WITHHELD} != set(table.withheld):
        yield "states: the list of withheld slabs is not the withheld slabs"
    if {slab.number for slab in table.all if slab.state is State.CACHED} != table.queued():
        yield "states: the eviction queue is not the cached slabs"


def _slabs(pool: Pool) -> Iterator[str]:
    for slab in pool.ledger.table.all:
        if not _is_right(pool, slab):
            yield f"slabs: {slab.number} is {slab.state.value} with {slab.holders} holders, worker {slab.worker}"


def _is_right(pool: Pool, slab: Slab) -> bool:
    worker = pool.workers.get(slab.worker) if slab.worker is not None else None
    if slab.state is State.LEASED:
        return worker is not None and slab.number in worker.leased and not slab.holders and slab.node is None
    if slab.worker is not None or any(slab.number in other.leased for other in pool.workers.values()):
        return False
    if slab.state is State.COMMITTED:
        return slab.holders > 0 or pool.settling
    if slab.state is State.CACHED:
        return not slab.holders and slab.node is not None and slab.node.indexed and slab.node.slab == slab.number
    return not slab.holders and slab.node is None


def _holders(pool: Pool) -> Iterator[str]:
    held = Counter(number for sequence in pool.sequences() for number in sequence.slabs.values())
    for slab in pool.ledger.table.all:
        if held[slab.number] != slab.holders:
            yield f"holders: {slab.number} has {held[slab.number]}, but counts {slab.holders}"


def _nodes(pool: Pool) -> Iterator[str]:
    table, index, refs = pool.ledger.table, pool.ledger.index, Counter[Node]()
    refs.update(node.parent for node in index.nodes if node.parent is not None)
    refs.update(slab.node for slab in table.all if slab.node is not None)
    refs.update(sequence.node for sequence in pool.sequences() if sequence.node is not None)
    where: dict[Node, list[int]] = {}
    for slab in table.all:
        if slab.node is not None:
            where.setdefault(slab.node, []).append(slab.number)
    for node in index.nodes:
        if node.refs != refs[node] or not node.refs or not node.indexed:
            yield f"nodes: {node.uid} has {refs[node]} references, but counts {node.refs}"
        known = [*([] if node.slab is None else [node.slab]), *node.copies]
        if sorted(known) != where.get(node, []):
            yield f"nodes: {node.uid} is in slabs {where.get(node)}, but known in {known}"
    if {node for node in index.nodes if node.slab is None and node.uid} != index.ghosts:
        yield "nodes: the ghosts are not the nodes without a slab"


def _waits(pool: Pool) -> Iterator[str]:
    sequences = pool.sequences()
    for worker in pool.workers.values():
        for key, waiter in worker.waiters.items():
            owner = waiter.owner
            if owner is None or waiter not in owner.waiters or owner not in pool.pending.listed or not owner.worker:
                yield f"waits: request {key} waits for nobody who computes"
    waiting = sum(len(sequence.waiters) for sequence in sequences)
    if waiting != sum(len(worker.waiters) for worker in pool.workers.values()):
        yield "waits: not all who are waited for are known"
    if any(sequence not in sequences for sequence in pool.pending.listed):
        yield "waits: a request that is gone is pending"


def _journal(pool: Pool) -> Iterator[str]:
    """Slabs without a node (a worker declared them; the old pool's record was torn) have no record."""
    written = {entry.slab for entry in pool.ledger.journal.load()}
    wanted = {s.number for s in pool.ledger.table.all if s.node is not None or s.state is State.QUARANTINED}
    if written != wanted:
        yield f"journal: has {sorted(written - wanted)} too many, {sorted(wanted - written)} too few"
