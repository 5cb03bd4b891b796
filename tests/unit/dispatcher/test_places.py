"""Fair places: who takes one from whom, and that it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from colibri_daemon.dispatcher.places import LEAD, behind, giver
from hypothesis import given
from hypothesis import strategies as st


@dataclass(eq=False)
class Request:
    key: int
    owner: str = "a"
    priority: int = 0
    paused: bool = False
    displaced: int = 0


def test_who_gives_up_a_place() -> None:
    old, young, low, often = Request(1), Request(4), Request(2, priority=-1), Request(9, displaced=1)
    paused, other = Request(3, priority=9, paused=True), Request(8, owner="b", priority=-5)
    for expected, running in (
        (paused, [old, young, low, often, paused]), (low, [old, young, low, often]), (young, [old, young, often]),
        (old, [old, often]), (often, [often]),
    ):  # fmt: skip
        assert giver([*running, other], {"a": len(running) + 1, "b": 1}) is expected


def poor(held: Mapping[str, int], waiting: Iterable[str]) -> frozenset[Hashable]:
    return behind(held, waiting, LEAD)


def test_a_hundred_of_one_and_one_of_another() -> None:
    held = {"a": 32}
    assert poor(held, ["b"]) == {"b"}
    assert poor({"a": 31, "b": 1}, ["a", "b"]) == {"b"}
    assert behind({"a": 17, "b": 16}, ["a", "b"], 1) == {"b"}  # next when a place is free
    assert not poor({"a": 17, "b": 16}, ["a", "b"])
    assert not poor({"a": 1}, ["b"])  # one place is nobody's to share
    assert not poor({}, ["a"])


owners = st.sampled_from("abcde")
requests = st.lists(st.tuples(owners, st.integers(-1, 1), st.booleans()), max_size=40)


def level(demand: Counter[str], places: int) -> Fraction:
    """What each owner may have of so many places, if those who want less leave the rest to the others."""
    left, hungry = Fraction(places), sorted(demand.values())
    while hungry and hungry[0] * len(hungry) <= left:
        left -= hungry.pop(0)
    return left / len(hungry) if hungry else Fraction(places)


@given(requests, requests)
def test_places_become_fair(running: list[tuple[str, int, bool]], waiting: list[tuple[str, int, bool]]) -> None:
    """All places are taken by running. Who gives one up has more than the fair share, who takes it less; that comes to
    an end, with shares as fair as whole places can be, and nobody who took one gives one."""
    held = [Request(key, *fields) for key, fields in enumerate(running)]
    lines = Counter(owner for owner, *_ in waiting)
    share = level(Counter(request.owner for request in held) + lines, len(held))
    gave, took = set(), set()
    while takers := poor(counts := Counter(request.owner for request in held), +lines):
        victim, taker = giver(held, counts), min(takers)
        assert victim is not None
        assert counts[victim.owner] > share > counts[taker]
        gave.add(victim.owner)
        took.add(taker)
        held.remove(victim)
        held.append(Request(100 + len(held), taker))
        lines[victim.owner] += 1
        lines[taker] -= 1
    assert not gave & took
    counts = Counter(request.owner for request in held)
    assert all(share - 1 < counts[owner] < share + 1 for owner in +lines if counts[owner] <= share or owner in gave)


@given(st.integers(1, 9), st.lists(owners, min_size=1, unique=True))
def test_equals_exchange_nothing(each: int, names: list[str]) -> None:
    assert not poor(dict.fromkeys(names, each), names)
    assert not poor(dict.fromkeys(names, each) | {names[0]: each + 1}, names)
