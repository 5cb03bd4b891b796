"""The prefix index: no hit rests on the hash, and what nothing needs goes."""

from __future__ import annotations

import random
from itertools import product

import pytest
from colibri_daemon.common.counters import Counters
from colibri_daemon.common.metrics import Source
from colibri_daemon.kvpool.messages import EVERY, FULL_MASK, Request
from colibri_daemon.kvpool.prefix import Node, PrefixIndex

SALTS = (b"x", b"y")
MASKS = [Request(pinned=pinned, window=1).mask for pinned in range(6)]


def index(hash_bits: int, counters: Counters, ghosts: int = 10_000) -> PrefixIndex:
    return PrefixIndex(b"model", 1, hash_bits, ghosts, counters)


def chunk(token: int) -> bytes:
    return token.to_bytes(4, "little")


def add(tree: PrefixIndex, parent: Node, mask: bytes, token: int, slab: int) -> Node:
    node, _ = tree.child(parent, mask, chunk(token))
    tree.fill(node, slab)
    return node


@pytest.mark.parametrize("hash_bits", [8, 256])
def test_what_is_found_is_what_was_asked_for(hash_bits: int) -> None:
    """Thousands of nodes: with 8 bits nearly all of them collide with others, in all that a node is made of."""
    counters, truth = Counters.private(Source.KVPOOL), dict[Node, object]()
    tree, chooser = index(hash_bits, counters), random.Random(5)
    asked = [(salt, full, mask, tokens) for salt in SALTS for full in (0, 2, 9) for mask in MASKS
             for tokens in product((0, 1, 2), repeat=5)]  # fmt: skip
    asked += [(b"x", 0, MASKS[0], (token,)) for token in range(600)]
    asked += [(b"x", 0, Request(pinned=pinned, window=1).mask, (0,)) for pinned in range(600)]
    chooser.shuffle(asked)
    found = 0
    for count, (salt, full, mask, tokens) in enumerate(asked):
        packed, node = b"".join(map(chunk, tokens)), tree.root(salt)
        path = tree.walk(salt, packed, len(tokens), full, mask)[1:]
        for at, step in enumerate(path):
            assert truth[step] == (salt, [FULL_MASK if o < full else mask for o in range(at + 1)], tokens[: at + 1])
        found += len(path)
        for at, token in enumerate(tokens):
            own = FULL_MASK if at < full else mask
            node = add(tree, node, own, token, count)
            content = (salt, [FULL_MASK if o < full else mask for o in range(at + 1)], tokens[: at + 1])
            assert truth.setdefault(node, content) == content or not node.indexed
    assert found > 100
    assert (counters.get("prefix_cache_rejects_total", reason="token_mismatch") > 0) == (hash_bits == 8)


def test_a_node_stays_while_something_needs_it() -> None:
    tree = index(256, Counters.private(Source.KVPOOL))
    root = tree.root(b"x")
    first = add(tree, root, FULL_MASK, 1, 11)
    second = add(tree, first, FULL_MASK, 2, 12)
    tree.vacate(first, 11)
    assert tree.ghosts == {first}
    assert tree.walk(b"x", chunk(1) + chunk(2), 2, EVERY, FULL_MASK) == [root, first, second]
    tree.vacate(second, 12)
    assert (tree.nodes, tree.ghosts) == ([], set())


def test_a_copy_takes_the_place_of_a_slab_that_is_gone() -> None:
    tree = index(256, Counters.private(Source.KVPOOL))
    node = add(tree, tree.root(b"x"), FULL_MASK, 1, 11)
    assert add(tree, tree.root(b"x"), FULL_MASK, 1, 12) is node
    tree.vacate(node, 11)
    assert (node.slab, tree.ghosts) == (12, set())


def test_ghosts_are_bounded_and_what_was_below_them_gives_way() -> None:
    counters = Counters.private(Source.KVPOOL)
    tree = index(256, counters, ghosts=1)
    path, token = [tree.root(b"x")], 0
    for token in range(4):
        path.append(add(tree, path[-1], FULL_MASK, token, token))
    for node, slab in zip(path[1:4], range(3), strict=True):
        tree.vacate(node, slab)
    assert len(tree.ghosts) == 1
    tokens = b"".join(map(chunk, range(4)))
    assert len(tree.walk(b"x", tokens, 4, EVERY, FULL_MASK)) < 2
    node, displaced = tree.root(b"x"), []
    for token in range(4):
        node, gone = tree.child(node, FULL_MASK, chunk(token))
        tree.fill(node, 10 + token)
        displaced.append(gone)
    assert displaced == [None, None, None, 3]
    assert [node.slab for node in tree.walk(b"x", tokens, 4, EVERY, FULL_MASK)[1:]] == [10, 11, 12, 13]
    assert counters.get("prefix_cache_rejects_total", reason="stale") > 0
