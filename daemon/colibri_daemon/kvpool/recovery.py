"""How a pool that was killed is made again: the journal says what each slab holds, the workers declare who has it.

Until all workers that live have declared, a slab may have holders that the pool does not know of yet, so nothing is
granted or evicted. The declarations win where the journal has no valid record: a slab whose commit was under way. Keys
of dead workers' requests are not in the journal; their slabs are found again through the index, or are free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .journal import Entry
from .ledger import Ledger
from .messages import U64, Held, PeerFault, WorkerId, whole
from .prefix import Node
from .sequences import Sequence, Worker
from .slabs import Slab, State

if TYPE_CHECKING:
    from .pool import Pool

SUSPECT = -1  # Slab.checked of what a dead pool left: whoever attaches it is given its CRC


# ---- the journal -----------------------------------------------------------------------------------------------------


def load(ledger: Ledger, now: float) -> None:
    """Slabs that an attach can find are cached. The others are committed without a holder until settle()."""
    if not ledger.journal.is_ours():
        ledger.journal.format()
    nodes: dict[int, Node] = {}
    for entry in sorted(ledger.journal.load(), key=lambda entry: entry.ordinal):  # parents first
        slab = ledger.table[entry.slab]
        if entry.quarantined:
            ledger.table.move(slab, State.QUARANTINED)
            continue
        if entry.uid not in nodes:
            nodes[entry.uid] = _node(ledger, entry, nodes)
        ledger.know(slab, nodes[entry.uid], entry.ordinal, entry.crc, entry.committed)
        slab.checked, slab.uses, slab.last_use = SUSPECT, 1, now
        ledger.table.move(slab, State.COMMITTED)
        if ledger.is_findable(slab):
            ledger.table.cache(slab, now)


def _node(ledger: Ledger, entry: Entry, nodes: dict[int, Node]) -> Node:
    index = ledger.index
    if not entry.indexed:
        return index.restored(entry.uid, None, entry.mask, entry.tokens, entry.digest)
    if entry.ordinal:
        return index.restored(entry.uid, nodes.get(entry.parent_uid), entry.mask, entry.tokens, entry.digest)
    root = index.restored_root(entry.parent)
    index.hold(root)
    node = index.restored(entry.uid, root, entry.mask, entry.tokens, entry.digest)
    index.drop(root)
    return node


def settle(pool: Pool, now: float) -> None:
    """Once all have declared: what nobody holds is cached or free."""
    if pool.undeclared:
        return
    for slab in pool.ledger.table.all:
        if slab.state is State.COMMITTED and not slab.holders:
            pool.ledger.settle(slab, now)


# ---- the workers -----------------------------------------------------------------------------------------------------


def declare(pool: Pool, worker: WorkerId, leased: list[Any], held: Held, now: float) -> None:
    if worker in pool.workers or worker in pool.dead:
        raise PeerFault(f"worker {worker} declares twice, or is dead")
    if (leased or held) and worker not in pool.undeclared:
        raise PeerFault(f"worker {worker} is new and declares {len(leased)} leased slabs, {len(held)} requests")
    _check_leased(pool.ledger, worker, leased)
    for key, (_, slabs) in held.items():
        _check_held(pool.ledger, whole(key, U64, "key"), slabs, set(leased))
    state = pool.workers[worker] = Worker(worker)
    for number in leased:
        pool.ledger.lease_this(state, pool.ledger.table[number])
    for key, (request, slabs) in held.items():
        sequence = Sequence(key, worker, request, pool.ledger.slab_tokens, 0, faults=pool.ledger.faults)
        _hold(pool.ledger, sequence, slabs, now)
        pool.enlist(sequence, now)
    if worker in pool.undeclared:
        pool.undeclared.remove(worker)
        settle(pool, now)


def _check_leased(ledger: Ledger, worker: WorkerId, leased: list[Any]) -> None:
    numbers = [whole(number, ledger.table.count, "slab") for number in leased]
    taken = [number for number in numbers if ledger.table[number].state is not State.FREE]
    if taken or len(set(numbers)) != len(numbers):
        raise PeerFault(f"{worker} declares leased slabs twice, or that are not its own: {taken}")


def _check_held(ledger: Ledger, key: int, slabs: Any, leased: set[int]) -> None:
    ordinals, numbers = [], []
    try:
        for ordinal, number in slabs:
            ordinals.append(whole(ordinal, 1 << 32, "ordinal"))
            numbers.append(whole(number, ledger.table.count, "slab"))
    except (TypeError, ValueError):
        raise PeerFault(f"request {key} is declared with what are no slabs") from None
    if ordinals != sorted(set(ordinals)) or len(set(numbers)) != len(numbers):
        raise PeerFault(f"request {key} is declared with slabs twice or out of order")
    if any(number in leased or ledger.table[number].state is State.LEASED for number in numbers):
        raise PeerFault(f"request {key} is declared with slabs that are leased")


def _hold(ledger: Ledger, sequence: Sequence, slabs: list[tuple[int, int]], now: float) -> None:
    for ordinal, number in slabs:
        sequence.next = ordinal + 1
        if ledger.table[number].state is not State.QUARANTINED:
            ledger.take(sequence, ordinal, ledger.table[number], now)
    sequence.redo = set(sequence.slabs)
    if not sequence.request.use:
        return
    root = ledger.index.root(sequence.request.salt)
    ledger.index.hold(root)
    last = ledger.table[sequence.slabs[sequence.next - 1]] if sequence.next - 1 in sequence.slabs else None
    if not sequence.next:
        ledger.set_end(sequence, root)
    elif last is not None and _is_indexed_at(ledger, last, sequence.next - 1, root):
        ledger.set_end(sequence, last.node)
    ledger.index.drop(root)


def _is_indexed_at(ledger: Ledger, slab: Slab, ordinal: int, root: Node) -> bool:
    """A worker cannot have its slabs indexed under another tenant's salt."""
    node = slab.node
    return node is not None and node.indexed and slab.ordinal == ordinal and ledger.index.is_below(node, root)


# ---- commits that are sent again -------------------------------------------------------------------------------------


def check_again(ledger: Ledger, sequence: Sequence, ordinal: int, number: int, tokens: bytes, crc: int) -> None:
    slab = ledger.table[number]
    if sequence.slabs.get(ordinal) != number:
        raise PeerFault(f"slab {number} committed again as {ordinal} of request {sequence.key}, which it is not")
    if slab.node is not None and (slab.node.tokens, slab.ordinal, slab.crc) != (tokens, ordinal, crc):
        raise PeerFault(f"slab {number} of request {sequence.key} committed again with other contents")


def commit_again(ledger: Ledger, sequence: Sequence, ordinal: int, tokens: bytes, crc: int, now: float) -> None:
    """Does what the dead pool may not have come to."""
    slab = ledger.table[sequence.slabs[ordinal]]
    if slab.node is not None:
        return
    root = ledger.index.root(sequence.request.salt)
    ledger.index.hold(root)
    before = sequence.slabs.get(ordinal - 1)
    parent = ledger.table[before].node if before is not None else None if ordinal else root
    ledger.record(slab, sequence, ordinal, tokens, crc, parent, now)
    ledger.index.drop(root)
    if ordinal == sequence.next - 1:
        ledger.set_end(sequence, slab.node)
