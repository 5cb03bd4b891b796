"""Fair places: whose turn it is for a place in a batch, and who gives one up for whom. Pure.

A free place goes to the owner who has fewest. When all are taken, an owner who waits takes one from the owner with
most, if that one has at least two more. Each such exchange makes the numbers of places more even (the sum of their
squares shrinks), so there is no cycle: with numbers that differ by one at most nothing is exchanged, and two owners
never push each other out in turns. Who gives one up had more than the fair share, which is what each owner may have if
those who want less leave the rest to the others; and as those with fewest take first, nobody who took one gives one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

LEAD = 2  # places that the one who gives must have more than the one who takes


class Running(Protocol):
    """key: grows with arrival. paused: its client does not read. displaced: how often it gave up its place before."""

    key: int
    priority: int
    paused: bool
    displaced: int

    @property
    def owner(self) -> Hashable: ...


R = TypeVar("R", bound=Running)


def behind(held: Mapping[Hashable, int], waiting: Iterable[Hashable], by: int) -> frozenset[Hashable]:
    """The owners who have fewest places of those who wait, if another has at least so many more. held: places by
    owner. Behind by 1 they are next for a free place, by LEAD another one gives up a place for them."""
    has = {owner: held.get(owner, 0) for owner in waiting}
    least, most = min(has.values(), default=0), max(held.values(), default=0)
    return frozenset(owner for owner, count in has.items() if count == least and least + by <= most)


def giver(running: Sequence[R], held: Mapping[Hashable, int]) -> R | None:
    """The request that gives up its place for an owner who is behind by LEAD: of the owners who hold most, paused ones
    first, then the lowest priority, then who was displaced least often, then the youngest. None if those who hold most
    have none among running."""
    most = max(held.values(), default=0)
    rich = [r for r in running if held[r.owner] == most]
    return min(rich, key=lambda r: (not r.paused, r.priority, r.displaced, -r.key), default=None)
