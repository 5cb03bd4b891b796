"""When output ends and what of it may be sent, against the definitions written out."""

from __future__ import annotations

import pytest
from colibri_daemon.worker.stops import Match, Stops
from hypothesis import given
from hypothesis import strategies as st
from reference.stops import Ending, Rules, ending

TOKEN = st.integers(0, 3)  # few tokens, so that sequences overlap with themselves and each other


def rules() -> st.SearchStrategy[Rules]:
    sequences = st.lists(st.lists(TOKEN, min_size=1, max_size=6).map(tuple), max_size=5).map(tuple)
    ends = st.lists(st.integers(2, 4), max_size=1).map(tuple)
    return st.builds(Rules, st.integers(1, 40), st.integers(0, 12), ends, ends, sequences)


def fresh(rules: Rules) -> Stops:
    return Stops(rules.max_tokens, rules.min_tokens, rules.eos_ids, rules.stop_ids, rules.sequences)


def now(stops: Stops) -> Ending:
    return stops.finish, stops.match and (stops.match.kind, stops.match.value), stops.released


@given(rules(), st.lists(TOKEN, min_size=40, max_size=40))
def test_every_token_as_defined(rules: Rules, text: list[int]) -> None:
    stops, released = fresh(rules), 0
    for n in range(1, rules.max_tokens + 1):
        stops.push(text[n - 1])
        assert now(stops) == ending(rules, text[:n])
        assert released <= stops.released <= stops.count == n
        released = stops.released
        if stops.finish:
            return


@given(rules(), st.lists(TOKEN, min_size=40, max_size=40), st.data())
def test_going_on_after_any_prefix_ends_alike(rules: Rules, text: list[int], data: st.DataObject) -> None:
    """From what was sent, and from what an abort released."""
    whole = fresh(rules)
    for token in text[: rules.max_tokens]:
        whole.push(token)
        if whole.finish:
            break
    for kept in (data.draw(st.integers(0, whole.released)), data.draw(st.integers(0, whole.count))):
        again = fresh(rules)
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
