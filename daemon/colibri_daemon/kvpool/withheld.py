"""Slabs that have no pages: those that a pool may not use yet, and those that it has given up.

While a reload replaces one arena by another both exist, and what they take together is bounded. The new pool begins
with its first slabs and grows; the old one is *retired*, and gives up whatever nobody holds. A request that still runs
on a retired pool goes on: it may take withheld slabs again, which then get new pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .slabs import SlabTable, State

if TYPE_CHECKING:
    from .pool import Pool


def withhold(table: SlabTable, usable: int) -> None:
    """All free ones but the first ``usable`` slabs."""
    for number in [number for number in table.free if number >= usable]:
        table.move(table[number], State.WITHHELD)


def grow(table: SlabTable, usable: int) -> None:
    """The first so many slabs have pages now. Those in front are used first."""
    for number in sorted((number for number in table.withheld if number < usable), reverse=True):
        table.move(table[number], State.FREE)


def give_up(pool: Pool) -> list[int]:
    """Of a retired pool: evicts what is cached and withholds what is free, once it is known who has what. Returns the
    slabs whose pages the caller is to give back."""
    table = pool.ledger.table
    if not pool.retired or pool.settling:
        return []
    pool.ledger.evict([slab for slab in table.all if slab.state is State.CACHED], "retire")
    free = list(table.free)
    withhold(table, 0)
    return free


def held(table: SlabTable) -> int:
    """Slabs that have pages."""
    return table.count - table.counts[State.WITHHELD]
