"""How many slabs a sequence needs and when it gives them back, against what each query sees."""

from __future__ import annotations

from colibri_daemon.common.kv import out_of_view, slabs_needed
from hypothesis import given
from hypothesis import strategies as st

SLAB = st.sampled_from([1, 2, 5, 16])


def seen(query: int, pinned: int, window: int, slab_tokens: int) -> set[int]:
    """Slabs of what a query sees."""
    return {i // slab_tokens for i in range(query + 1) if i < pinned or i > query - window}


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 200), SLAB, st.randoms())
def test_slabs_needed_are_enough_and_what_is_seen_is_there(pinned, window, chunk, length, slab_tokens, random) -> None:
    """Through a whole text, in random chunks: never more slabs than promised, none missing that a query sees."""
    position, table = 0, set[int]()
    while position < length:
        end = min(length, position + random.randint(1, chunk))
        table |= set(range(-(-position // slab_tokens), -(-end // slab_tokens)))
        assert len(table) <= slabs_needed(length, pinned, window, chunk, slab_tokens)
        for query in range(position, end):
            assert seen(query, pinned, window, slab_tokens) <= table
        position = end
        table -= set(out_of_view(position, pinned, window, slab_tokens))


@given(st.integers(0, 300), st.integers(0, 60), st.integers(1, 60), SLAB)
def test_a_resume_finds_all_it_sees_one_slab_back(position: int, pinned: int, window: int, slab_tokens: int) -> None:
    gone = set(out_of_view(position, pinned, window, slab_tokens))
    boundary = max(0, (position // slab_tokens - 1) * slab_tokens)
    for query in range(boundary, position + 1):
        assert not gone & seen(query, pinned, window, slab_tokens)


def test_full_attention_keeps_everything() -> None:
    assert not out_of_view(10_000, 0, 0, 16)
    assert slabs_needed(1000, 0, 0, 512, 16) == 63


def test_a_window_gives_back_what_is_between_it_and_the_pinned_prefix() -> None:
    """Slabs 0 and 1 are pinned; a query at 288, one slab before the last full one, sees from 249 on."""
    assert out_of_view(319, 20, 40, 16) == range(2, 15)
