"""When output ends and what of it may be sent, against the definitions written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from colibri_daemon.worker.stops import Match, Stops
from hypothesis import given
from hypothesis import strategies as st

TOKEN = st.integers(0, 3)  # few tokens, so that sequences overlap with themselves and each other


@dataclass(frozen=True)
class Rules:
    max_tokens: int
    min_tokens: int
    eos_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    sequences: tuple[tuple[int, ...], ...]

    def stops(self) -> Stops:
        return Stops(self.max_tokens, self.min_tokens, self.eos_ids, self.stop_ids, self.sequences)


def rules() -> st.SearchStrategy[Rules]:
    sequences = st.lists(st.lists(TOKEN, min_size=1, max_size=6).map(tuple), max_size=5).map(tuple)
    ends = st.lists(st.integers(2, 4), max_size=1).map(tuple)
    return st.builds(Rules, st.integers(1, 40), st.integers(0, 12), ends, ends, sequences)


def ends_with(text: Sequence[int], sequence: Sequence[int]) -> bool:
    return len(sequence) <= len(text) and tuple(text[len(text) - len(sequence) :]) == tuple(sequence)


def held(rules: Rules, text: Sequence[int]) -> int:
    """Length of the longest end of text that begins a stop sequence without being all of it."""
    starts = [sequence[:n] for sequence in rules.sequences for n in range(len(sequence))]
    return max((len(start) for start in starts if ends_with(text, start)), default=0)


def outcome(rules: Rules, text: Sequence[int]) -> tuple[str | None, Match | None, int]:
    """(finish, match, released) once text has been generated; nothing ended before its last token."""
    if len(text) > rules.min_tokens:
        for kind, ids in (("eos", rules.eos_ids), ("id", rules.stop_ids)):
            if text[-1] in ids:
                return "stop", Match(kind, text[-1]), len(text)
        found = [(-len(s), i) for i, s in enumerate(rules.sequences) if ends_with(text, s)]
        if found:
            length, index = min(found)
            return "stop", Match("sequence", index), len(text) + length
    if len(text) == rules.max_tokens:
        return "length", None, len(text)
    return None, None, len(text) - held(rules, text)


@given(rules(), st.lists(TOKEN, min_size=40, max_size=40))
def test_every_token_as_defined(rules: Rules, text: list[int]) -> None:
    stops, released = rules.stops(), 0
    for n in range(1, rules.max_tokens + 1):
        stops.push(text[n - 1])
        assert (stops.finish, stops.match, stops.released) == outcome(rules, text[:n])
        assert released <= stops.released <= stops.count == n
        released = stops.released
        if stops.finish:
            return


@given(rules(), st.lists(TOKEN, min_size=40, max_size=40), st.data())
def test_going_on_after_any_prefix_ends_alike(rules: Rules, text: list[int], data: st.DataObject) -> None:
    """From what was sent, and from what an abort released."""
    whole = rules.stops()
    for token in text[: rules.max_tokens]:
        whole.push(token)
        if whole.finish:
            break
    for kept in (data.draw(st.integers(0, whole.released)), data.draw(st.integers(0, whole.count))):
        again = rules.stops()
        again.restore(text[:kept])
        assert again.released == again.count == kept
        for token in text[kept : whole.count]:
            assert again.finish is None
            again.push(token)
        assert (again.finish, again.match, again.count) == (whole.finish, whole.match, whole.count)
        assert again.released == max(kept, whole.released)


def test_a_long_resume_remembers_a_sequence_that_began_in_it() -> None:
    stops = Stops(1000, sequences=[[7, 8, 9]])
    stops.restore([1] * 500 + [7, 8])
    stops.push(9)
    assert (stops.finish, stops.match, stops.released) == ("stop", Match("sequence", 0), 502)


def test_a_resume_that_has_ended_needs_no_more() -> None:
    for sent, finish, match in (([5, 2], "stop", Match("eos", 2)), ([5, 5, 5], "length", None)):
        stops = Stops(3, eos_ids=[2])
        stops.restore(sent)
        assert (stops.finish, stops.match, stops.count) == (finish, match, len(sent))


@pytest.mark.parametrize("finish", ["abort", "deadline"])
def test_another_end_releases_what_is_held(finish: str) -> None:
    stops = Stops(10, sequences=[[1, 2, 3]])
    for token in (5, 1, 2):
        stops.push(token)
    assert stops.released == 1
    stops.end(finish)
    assert (stops.finish, stops.released) == (finish, 3)


def test_ids_are_barred_for_the_first_tokens_only() -> None:
    stops = Stops(10, 2, eos_ids=[2], stop_ids=[2, 3])
    seen = []
    for _ in range(3):
        seen.append(sorted(stops.barred))
        stops.push(1)
    assert seen == [[2, 3], [2, 3], []]


def test_no_tokens_wanted() -> None:
    assert Stops(0).finish == "length"
