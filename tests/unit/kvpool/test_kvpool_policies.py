"""Which cached slab goes first, and which slabs a sequence needs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from colibri_daemon.common.declaration import SETTINGS
from colibri_daemon.kvpool.policies import POLICIES
from colibri_daemon.kvpool.policies.pinned_window import hidden_after, longest_hit, view
from hypothesis import given
from hypothesis import strategies as st


@dataclass
class Cached:
    name: str
    ordinal: int = 0
    uses: int = 1
    last_use: float = 0.0


def order(policy: str, *entries: Cached) -> str:
    return " ".join(e.name for e in sorted(entries, key=lambda entry: POLICIES[policy](entry, 1e6)))


@pytest.mark.parametrize("policy", POLICIES)
def test_of_one_sequence_the_end_goes_first(policy: str) -> None:
    assert order(policy, Cached("start", 0), Cached("middle", 4), Cached("end", 9)) == "end middle start"


@pytest.mark.parametrize("policy", POLICIES)
def test_of_equal_slabs_the_one_used_last_stays(policy: str) -> None:
    assert order(policy, Cached("new", last_use=2.0), Cached("old", last_use=1.0)) == "old new"


def test_what_the_policies_differ_in() -> None:
    shared, fresh = Cached("shared", uses=64, last_use=100.0), Cached("fresh", last_use=200.0)
    assert order("lru", shared, fresh) == "shared fresh"
    assert order("lfu", shared, fresh) == "fresh shared"
    assert order("lfu", shared, Cached("fresh", last_use=10_000.0)) == "shared fresh"  # uses age
    deep, shallow = Cached("deep", 40, last_use=200.0), Cached("shallow", 1, last_use=100.0)
    assert order("lru", deep, shallow) == "shallow deep"
    assert order("size_aware", deep, shallow) == "deep shallow"


def test_the_setting_offers_them_all() -> None:
    assert SETTINGS["kv_eviction"].choices == tuple(POLICIES)


ATTENTION = {"pinned": st.integers(0, 9), "window": st.integers(0, 9), "slab_tokens": st.sampled_from([1, 2, 4])}


def seen(query: int, before: int, pinned: int, window: int, slab_tokens: int) -> set[int]:
    """Ordinals of what a query sees among the tokens before ``before``, token by token."""
    return {t // slab_tokens for t in range(before) if not window or t < pinned or t > query - window}


@given(slabs=st.integers(0, 12), **ATTENTION)
def test_the_view_is_what_the_next_query_sees(slabs: int, pinned: int, window: int, slab_tokens: int) -> None:
    first, second = view(slabs, pinned, window, slab_tokens)
    length = slabs * slab_tokens
    assert {*range(first), *range(second, slabs)} == seen(length, length, pinned, window, slab_tokens)


@given(ordinal=st.integers(0, 12), **ATTENTION)
def test_what_is_given_back_is_seen_by_nobody_from_one_slab_before_on(
    ordinal: int, pinned: int, window: int, slab_tokens: int
) -> None:
    boundary = ordinal * slab_tokens
    kept = set(range(ordinal + 1)) - set(hidden_after(ordinal, pinned, window, slab_tokens))
    assert kept == seen(boundary, boundary + slab_tokens, pinned, window, slab_tokens)


@given(resident=st.lists(st.booleans(), max_size=14), **ATTENTION)
def test_the_longest_hit_has_no_hole_in_view(resident: list[bool], pinned: int, window: int, slab_tokens: int) -> None:
    fits = [
        n for n in range(len(resident) + 1)
        if all(resident[o] for o in seen(n * slab_tokens, n * slab_tokens, pinned, window, slab_tokens))
    ]  # fmt: skip
    assert longest_hit(resident, pinned, window, slab_tokens) == max(fits)
