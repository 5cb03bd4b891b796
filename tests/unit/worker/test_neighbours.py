"""worker/neighbours.py: whose slab a request may copy the beginning of, and for whom it waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from colibri_daemon.common.job import Job
from colibri_daemon.worker.neighbours import LEAST, begun, coming
from colibri_daemon.worker.request import Request
from colibri_engine import Engine
from colibri_engine._colibri import lib
from fixtures.models import Models

SIZE = 64
HOW = Job(b"", max_tokens=20, pinned=128, window=384)
TEXT = list(range(3, 203))


@pytest.fixture(scope="module")
def engine(models: Models) -> Iterator[Engine]:
    with Engine.open(models.tiny("q4"), slab_tokens=SIZE) as opened:
        yield opened


@pytest.fixture
def made(engine: Engine) -> Any:
    def request(tokens: list[int], position: int, slabs: list[int], **fields: Any) -> Request:
        """Computed up to position, with this slab table."""
        job = replace(HOW, tokens=np.array(tokens, "<u4").tobytes(), **fields)
        made = Request(len(tokens), job, engine.info, 1000)
        made.lane.add_slabs(slabs)
        made.lane.position = position
        return made

    return request


def test_the_longest_common_beginning_is_copied(made: Any) -> None:
    me = made([*TEXT[:120], 1, 1], 64, [7])
    short, long = made([*TEXT[:90], 2], 91, [7, 8]), made([*TEXT[:110], 2, 2], 112, [7, 9])
    assert begun(me, [me, short, long]) == (9, 110)
    assert begun(me, [short]) == (8, 90)


def test_only_what_is_computed(made: Any) -> None:
    me = made([*TEXT[:120], 1], 64, [7])
    other = made(TEXT, 64 + LEAST - 1, [7, 8])
    assert begun(me, [other]) is None
    other.lane.position = 64 + LEAST
    assert begun(me, [other]) == (8, 64 + LEAST)


def test_never_a_whole_slab_and_never_all_of_the_text(made: Any) -> None:
    other = made(TEXT, 200, [7, 8, 9, 10])
    assert begun(made(TEXT, 64, [7]), [other]) == (8, 127)  # whole ones are the cache's
    assert begun(made(TEXT[:100], 64, [7]), [other]) == (8, 99)  # logits of the last token are wanted
    assert begun(made(TEXT[:100], 0, []), [other]) == (7, 63)


def test_who_may_not_share_the_cache_does_not_share_this(made: Any) -> None:
    other = made(TEXT, 200, [7, 8, 9, 10], salt=b"a")
    for fields in ({"salt": b"b"}, {"salt": b"a", "cache": False}, {"salt": b"a", "window": 300},
                   {"salt": b"a", "positions": "absolute"}):  # fmt: skip
        me = made(TEXT[:100], 0, [], **fields)
        assert begun(me, [other]) is None
        other.lane.position = 10
        assert not coming(me, [other])
        other.lane.position = 200
    assert begun(made(TEXT[:100], 0, [], salt=b"a"), [other]) == (7, 63)
    other.cache = False
    assert begun(made(TEXT[:100], 0, [], salt=b"a"), [other]) is None


@pytest.mark.parametrize("slabs", [[6, 8], [7, lib.COLIBRI_NO_SLAB], [7]])
def test_not_another_text_and_no_slab_that_is_gone(made: Any, slabs: list[int]) -> None:
    assert begun(made(TEXT[:120], 64, [7]), [made(TEXT, 128, slabs)]) is None


def test_out_of_view_is_no_common_beginning(made: Any) -> None:
    gone = lib.COLIBRI_NO_SLAB
    assert begun(made(TEXT[:120], 64, [gone]), [made(TEXT, 128, [gone, 8])]) is None


def test_waits_for_who_computes_it_next(made: Any) -> None:
    me, other = made([*TEXT[:120], 1], 64, [7]), made(TEXT, 64, [7])
    assert coming(me, [me, other])  # its prefill goes on from where mine begins
    assert not coming(me, [me])
    assert not coming(me, [made([*TEXT[: 64 + LEAST - 1], 1, 1], 64, [7])])  # too little
    other.lane.position = 100
    other.lane.add_slabs([8])
    assert coming(me, [other])
    other.lane.position = 120
    assert not coming(me, [other])  # all there
    assert begun(me, [other]) == (8, 120)
