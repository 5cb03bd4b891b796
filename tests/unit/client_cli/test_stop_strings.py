"""colibri_client.text.StopStrings against a definition by brute force."""

from __future__ import annotations

import pytest
from colibri_client.text import StopStrings
from hypothesis import example, given
from hypothesis import strategies as st

LETTERS = st.text("ab", max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, int | None]:
    """The definition: the first end at which some stop string is complete, of several there the longest."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], stops.index(longest)
    return text, None


def must_wait(text: str, stops: list[str]) -> int:
    """How many characters at the end of text may become part of a match."""
    begins = [n for n in range(1, len(text) + 1) if any(len(s) > n and s.startswith(text[-n:]) for s in stops)]
    return max(begins, default=0)


@given(pieces=st.lists(LETTERS), stops=STOPS)
@example(pieces=["aaa", "b"], stops=["ab", "aab"])
@example(pieces=["ab"], stops=["b", "ab"])
@example(pieces=["abab"], stops=["abb", "ba"])
def test_like_the_definition_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    machine, out, seen = StopStrings(stops), "", ""
    for piece in pieces:
        out += machine.push(piece)
        seen += piece
        expected, match = cut(seen, stops)
        assert machine.match == match
        held = 0 if match is not None else must_wait(expected, stops)
        assert out == expected[: len(expected) - held], "neither more nor less than what is undecided is held back"
    assert out + machine.finish() == cut(seen, stops)[0]


def test_nothing_comes_after_a_match() -> None:
    machine = StopStrings(["STOP"])
    assert [machine.push(p) for p in ("one S", "TOP two", "three")] == ["one ", "", ""]
    assert machine.match == 0
    assert machine.finish() == ""


def test_what_was_held_back_comes_at_the_end() -> None:
    machine = StopStrings(["\n\n"])
    assert machine.push("text\n") == "text"
    assert machine.finish() == "\n"
    assert machine.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopStrings(["a", ""])
