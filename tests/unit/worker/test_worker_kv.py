"""Slabs: how many a sequence needs, when it gives them back, and that none is lost."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from colibri_daemon.common.kv import out_of_view, slabs_needed
from colibri_daemon.worker.kv import LocalKv
from colibri_engine import EngineError
from colibri_engine.sequence import Attention, KvArena
from hypothesis import given
from hypothesis import strategies as st

NO_TOKENS = np.empty(0, np.uint32)


def local(slabs: int, slab_tokens: int = 16) -> LocalKv:
    return LocalKv(KvArena(SimpleNamespace(slab_bytes=64), slabs), slab_tokens)


SLAB = st.sampled_from([1, 2, 5, 16])


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 200), SLAB, st.randoms())
def test_slabs_needed_are_enough_and_what_is_seen_is_there(pinned, window, chunk, length, slab_tokens, random) -> None:
    """Through a whole text, in random chunks: never more slabs than promised, none missing that a query sees."""
    kv, position, table = local(length), 0, set[int]()
    kv.attach(1, NO_TOKENS, Attention(pinned, window, 0))
    kv._slab_tokens = slab_tokens
    while position < length:
        end = min(length, position + random.randint(1, chunk))
        need = -(-end // slab_tokens) - -(-position // slab_tokens)
        start = -(-position // slab_tokens)
        kv.take(1, need)
        table |= set(range(start, start + need))
        assert len(table) == kv.total - kv.free <= slabs_needed(length, pinned, window, chunk, slab_tokens)
        for query in range(position, end):
            seen = {i for i in range(query + 1) if i < pinned or i > query - window}
            assert {i // slab_tokens for i in seen} <= table
        position = end
        gone = kv.commit(1, position)
        assert set(gone) <= table
        table -= set(gone)
    kv.release(1)
    assert kv.free == kv.total


@given(st.integers(0, 300), st.integers(0, 60), st.integers(1, 60), SLAB)
def test_a_resume_finds_all_it_sees_one_slab_back(position: int, pinned: int, window: int, slab_tokens: int) -> None:
    gone = set(out_of_view(position, pinned, window, slab_tokens))
    boundary = max(0, (position // slab_tokens - 1) * slab_tokens)
    for query in range(boundary, position + 1):
        seen = {i for i in range(query + 1) if i < pinned or i > query - window}
        assert not gone & {i // slab_tokens for i in seen}


def test_full_attention_keeps_everything() -> None:
    assert not out_of_view(10_000, 0, 0, 16)
    assert slabs_needed(1000, 0, 0, 512, 16) == 63


def test_what_is_not_there_is_not_given() -> None:
    kv = local(3)
    for key in (1, 2):
        kv.attach(key, NO_TOKENS, Attention(0, 0, 0))
    first = kv.take(1, 2)
    with pytest.raises(EngineError, match="1 free slabs, 2 are needed"):
        kv.take(2, 2)
    assert kv.free == 1
    assert {*first, *kv.take(2, 1)} == {0, 1, 2}
    kv.release(1)
    kv.release(2)
    assert kv.free == 3


def test_a_window_gives_back_each_slab_once() -> None:
    kv, gone = local(20), list[int]()
    kv.attach(1, NO_TOKENS, Attention(20, 40, 0))
    kv.take(1, 20)
    for position in range(320):
        gone += kv.commit(1, position)
    assert gone == list(range(2, 15))  # slabs 0 and 1 are pinned; 272 is the last boundary, which sees from 233 on
