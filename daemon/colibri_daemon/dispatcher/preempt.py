"""Who gives way when the KV cache is full, and when who gave way may come back. Pure.

The first of those that run, by priority and then by age, is never a victim: whatever happens to the others, it goes on
to its end, and then another one is first. So requests that do not fit together end one after the other, at worst.
That they do not take turns at pushing each other out is headroom()'s: who was preempted often waits for more room than
it needs, in the end for all there is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar

from .places import LEAD

DOUBLINGS_MOST = 20  # of the headroom: more slabs than there are


class Running(Protocol):
    """key: grows with arrival. paused: its client does not read. preemptions: so far."""

    key: int
    priority: int
    paused: bool
    preemptions: int

    @property
    def owner(self) -> Hashable: ...


R = TypeVar("R", bound=Running)


def victim(running: Sequence[R]) -> R | None:
    """Paused ones before others, then those whose owner has more than a fair share of places, then the lowest priority,
    then who was preempted least often, then the youngest. None if there is nobody but the first."""
    first = max(running, key=lambda r: (not r.paused, r.priority, -r.key), default=None)
    others = [r for r in running if r is not first]
    held = Counter(r.owner for r in running)
    rich = min(held.values(), default=0) + LEAD
    return min(others, default=None, key=lambda r: (
        not r.paused, held[r.owner] < rich, r.priority, r.preemptions, -r.key))  # fmt: skip


def headroom(preemptions: int, running: int) -> int:
    """Slabs that must be left when a request joins so many running ones: none for a new one. One that was preempted
    leaves a slab for each of them to grow by, and twice as many after each further preemption."""
    return running << min(preemptions - 1, DOUBLINGS_MOST) if preemptions else 0


def fits(need: int, preemptions: int, running: int, available: int) -> bool:
    """Whether a request may go to a worker. need: slabs for what it has to compute first, and one of output.
    available: slabs that are free or can be made free, and are promised to nobody. When nothing runs it may always:
    that it fits at all was checked, and nobody else would ever make room."""
    return not running or need + headroom(preemptions, running) <= available
