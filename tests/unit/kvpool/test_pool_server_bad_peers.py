"""What the pool does about peers that are not right: refused, reported and harmless to the others."""

from __future__ import annotations

from typing import Any

import pytest
from colibri_daemon.common import pool_ipc
from colibri_daemon.kvpool.server import EOF_SECONDS
from hypothesis import given, settings
from hypothesis import strategies as st
from pooled import DISPATCHER, GEOMETRY, REQUEST, SLABS, TAGS, A, B, Peers, T, compute, hello, ids, wanted

BAD = {
    "no message": lambda slabs: 7,
    "an empty one": lambda slabs: [],
    "an unknown tag": lambda slabs: [99, 1],
    "a tag that is a list": lambda slabs: [[], 1],
    "the dispatcher's": lambda slabs: [pool_ipc.DROP, 1],
    "too few fields": lambda slabs: [pool_ipc.COMMIT, 1, 0],
    "too many": lambda slabs: [pool_ipc.ALLOC, 1, 2],
    "a negative number": lambda slabs: [pool_ipc.ALLOC, -1],
    "a number too large": lambda slabs: [pool_ipc.ALLOC, 1 << 40],
    "true": lambda slabs: [pool_ipc.ALLOC, True],
    "hello again": lambda slabs: hello(A),
    "a request that is none": lambda slabs: [pool_ipc.ATTACH, 2, [1]],
    "a request with more": lambda slabs: [pool_ipc.ATTACH, 2, REQUEST | {"more": 1}],
    "a mode that is a list": lambda slabs: [pool_ipc.ATTACH, 2, REQUEST | {"positions": []}],
    "half a token": lambda slabs: [pool_ipc.ATTACH, 2, REQUEST | {"tokens": b"abc", "limit": 0}],
    "a limit beyond the tokens": lambda slabs: [pool_ipc.ATTACH, 2, REQUEST | {"limit": 99}],
    "a key it has": lambda slabs: [pool_ipc.ATTACH, 1, REQUEST],
    "a key that is text": lambda slabs: [pool_ipc.ATTACH, "x", REQUEST],
    "release of nothing": lambda slabs: [pool_ipc.RELEASE, 77],
    "give of no list": lambda slabs: [pool_ipc.GIVE, 3],
    "give of another's": lambda slabs: [pool_ipc.GIVE, [slabs[B]]],
    "give twice": lambda slabs: [pool_ipc.GIVE, [slabs[A], slabs[A]]],
    "give of a free one": lambda slabs: [pool_ipc.GIVE, [slabs[None]]],
    "give of what is not there": lambda slabs: [pool_ipc.GIVE, [SLABS]],
    "commit of another's": lambda slabs: [pool_ipc.COMMIT, 1, 0, slabs[B], REQUEST["tokens"][: T * 4], 7],
    "commit of a free one": lambda slabs: [pool_ipc.COMMIT, 1, 0, slabs[None], REQUEST["tokens"][: T * 4], 7],
    "commit out of order": lambda slabs: [pool_ipc.COMMIT, 1, 1, slabs[A], REQUEST["tokens"][T * 4 :], 7],
    "commit of other tokens": lambda slabs: [pool_ipc.COMMIT, 1, 0, slabs[A], ids(1, 2), 7],
    "commit of too few tokens": lambda slabs: [pool_ipc.COMMIT, 1, 0, slabs[A], b"", 7],
    "commit for nobody": lambda slabs: [pool_ipc.COMMIT, 77, 0, slabs[A], ids(1), 7],
    "a crc too large": lambda slabs: [pool_ipc.COMMIT, 1, 0, slabs[A], REQUEST["tokens"][: T * 4], 1 << 32],
    "bad of what is not there": lambda slabs: [pool_ipc.BAD, -1],
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_message(peers, what):
    """Refused, the sender not heard any more and killed; nothing changes until it is dead; the others go on."""
    peers.say(A, [pool_ipc.ATTACH, 1, REQUEST])
    slabs: dict[Any, int] = {A: peers.granted(A, 1)[0], B: peers.granted(B, 1)[0]}
    slabs[None] = next(n for n in range(SLABS) if n not in slabs.values())
    before = peers.pool.counts(), peers.pool.leases()
    assert peers.say(A, BAD[what](slabs)) == []
    assert (peers.pool.counts(), peers.pool.leases()) == before
    assert peers.killed() == [("worker", *A)]
    assert peers.say(A, [pool_ipc.ALLOC, 1]) == []
    peers.server.lose(A, peers.now)
    assert peers.turn(2 * EOF_SECONDS) == []
    assert peers.killed() == []
    assert len(peers.granted(B, 1)) == 1
    peers.server.dead(A, False, peers.now)
    peers.turn()
    assert peers.pool.counts()["leased"] == 2
    peers.join((0, 2))
    assert len(peers.granted((0, 2), 1)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"slot": 2},
        {"epoch": 2},
        {"geometry": GEOMETRY | {"slabs": 9}},
        {"geometry": GEOMETRY | {"kv_format": "f32"}},
        {"geometry": None},
        {"leased": [1]},  # a new worker has nothing
        {"leased": 1},
        {"held": {1: [REQUEST, []]}},
        {"held": {1: []}},
        {"held": []},
        {"held": {1: [{}, [[0, 0]]]}},
        {"more": 1},
    ],
)
def test_a_bad_hello(changes):
    peers = Peers()
    peers.server.introduce(A)
    assert peers.say(A, hello(A, **changes)) == []
    assert peers.killed() == [("worker", *A)]
    assert peers.pool.counts()["free"] == SLABS


@pytest.mark.parametrize("first", [[pool_ipc.ALLOC, 1], [pool_ipc.ATTACH, 1, REQUEST], [pool_ipc.RELEASE, 1]])
def test_hello_comes_first(first):
    peers = Peers()
    peers.server.introduce(A)
    assert peers.say(A, first) == []
    assert peers.killed() == [("worker", *A)]


@pytest.mark.parametrize("message", [[pool_ipc.ALLOC, 1], [pool_ipc.LOOKUP, 1], [pool_ipc.LOOKUP, "x", REQUEST],
                                     [pool_ipc.LOOKUP, 1, {"limit": 7}], [pool_ipc.DROP, -1], "x"])  # fmt: skip
def test_a_bad_dispatcher(peers, message):
    peers.server.introduce(DISPATCHER)
    assert peers.say(DISPATCHER, message) == []
    assert peers.killed() == [("dispatcher", 0, 0)]
    assert len(peers.granted(A, 1)) == 1


def test_a_worker_that_dies_holding_everything(peers):
    tokens = ids(6)
    compute(peers, A, 1, tokens, 4)
    peers.granted(A, SLABS - 4)
    assert peers.say(B, [pool_ipc.ALLOC, SLABS]) == []
    peers.say(B, [pool_ipc.ATTACH, 2, wanted(tokens)])
    peers.server.lose(A, peers.now)
    assert peers.turn() == []  # it may still write
    peers.server.dead(A, False, peers.now)
    answers = peers.turn()
    assert [(peer, message[0]) for peer, message in answers] == [(B, pool_ipc.ATTACHED), (B, pool_ipc.GRANT)]
    assert len(answers[1][1][1]) == SLABS - 4
    peers.server.introduce(DISPATCHER)
    peers.say(DISPATCHER, [pool_ipc.DROP, 1])
    peers.say(B, [pool_ipc.RELEASE, 2])
    assert sum(peers.pool.counts().values()) == SLABS
    assert peers.pool.counts()["committed"] == 0


def test_a_link_that_ends_before_its_worker(peers):
    peers.server.lose(A, peers.now)
    peers.turn(EOF_SECONDS / 2)
    assert peers.killed() == []
    assert peers.server.due == pytest.approx(peers.now + EOF_SECONDS / 2)
    peers.turn(EOF_SECONDS)
    assert peers.killed() == [("worker", *A)]


# ---- anything at all -----------------------------------------------------------------------------------------------

FIELD = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 12) | st.integers(0, 1 << 66) | st.binary(max_size=70)
    | st.text(max_size=5) | st.floats() | st.sampled_from([REQUEST, REQUEST["tokens"][: T * 4], GEOMETRY, *hello(A)]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
ANY = st.tuples(st.sampled_from([A, B, DISPATCHER]),
                FIELD | st.builds(lambda tag, rest: [tag, *rest], st.sampled_from(TAGS), st.lists(FIELD, max_size=6)))


@settings(max_examples=200)
@given(st.lists(ANY, max_size=30))
def test_no_message_hurts_the_pool(said):
    """Whatever is said is answered or refused; nothing else is raised and the invariants hold."""
    peers = Peers()
    for worker in (A, B):
        peers.join(worker)
    peers.server.introduce(DISPATCHER)
    for peer, message in said:
        peers.say(peer, message)
        for kind, slot, epoch in peers.killed():
            if kind == "dispatcher":
                peers.server.lose(DISPATCHER, peers.now)
                peers.server.introduce(DISPATCHER)
            else:
                peers.server.dead((slot, epoch), False, peers.now)
    assert sum(peers.pool.counts().values()) == SLABS
