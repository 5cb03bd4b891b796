"""What the pool answers its peers, and what it does about those that are not right. Messages only, no sockets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from colibri_daemon.common import pool_ipc
from colibri_daemon.kvpool import server
from colibri_daemon.kvpool.check import check
from colibri_daemon.kvpool.journal import Journal
from colibri_daemon.kvpool.pool import Pool
from colibri_daemon.kvpool.server import EOF_SECONDS, STATS_SECONDS, Server
from hypothesis import given, settings
from hypothesis import strategies as st

T, SLABS = 16, 8
GEOMETRY = {"slabs": SLABS, "slab_bytes": 4096, "slab_tokens": T, "kv_format": "f16"}
A, B = (0, 1), (1, 1)  # two workers
DISPATCHER = None
SETTLE = 5.0


def ids(slabs: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).integers(0, 1000, slabs * T, "<u4").tobytes()


def wanted(tokens: bytes, **changes: Any) -> dict[str, Any]:
    return {"tokens": tokens, "salt": b"s", "use": True, "pinned": 0, "window": 0, "positions": "cache",
            "limit": max(0, len(tokens) // 4 - 1)} | changes  # fmt: skip


class Peers:
    """A server with its peers at the other end. now: the time, moved by hand."""

    def __init__(self, journal: Journal | None = None, survivors: tuple[tuple[int, int], ...] = ()) -> None:
        self.now = 100.0
        self.pool = Pool(SLABS, T, "lru", b"identity", journal, survivors, self.now)
        self.server = Server(self.pool, GEOMETRY, self.now, SETTLE)

    def say(self, peer: Any, *messages: list[Any]) -> list[Any]:
        """Says it, ends the turn and returns what is sent to whom."""
        for message in messages:
            self.server.hear(peer, message, self.now)
        return self.turn()

    def turn(self, wait: float = 0.0) -> list[Any]:
        self.now += wait
        self.server.turn(self.now)
        out, self.server.out = self.server.out, []
        assert check(self.pool) == []
        return [(peer, message) for peer, message in out if message[0] != pool_ipc.STATS]

    def join(self, worker: tuple[int, int], leased: Any = (), held: Any = None) -> list[Any]:
        self.server.introduce(worker)
        return self.say(worker, hello(worker, leased=list(leased), held=held or {}))

    def killed(self) -> list[tuple[str, int, int]]:
        """Whom the supervisor is asked to kill."""
        orders = [(order["kind"], order["slot"], order["epoch"]) for order in self.server.orders]
        self.server.orders.clear()
        return orders

    def granted(self, worker: tuple[int, int], n: int) -> list[int]:
        ((peer, (tag, slabs)),) = self.say(worker, [pool_ipc.ALLOC, n])
        assert (peer, tag) == (worker, pool_ipc.GRANT)
        return slabs


def hello(worker: tuple[int, int], **changes: Any) -> list[Any]:
    body = {"slot": worker[0], "epoch": worker[1], "geometry": GEOMETRY, "leased": [], "held": {}}
    return [pool_ipc.HELLO, body | changes]


@pytest.fixture
def peers() -> Peers:
    made = Peers()
    made.join(A)
    made.join(B)
    return made


def compute(peers: Peers, worker: tuple[int, int], key: int, tokens: bytes, slabs: int) -> list[int]:
    """A request that computes so many slabs; which."""
    peers.say(worker, [pool_ipc.ATTACH, key, wanted(tokens)])
    used = peers.granted(worker, slabs)
    for ordinal, slab in enumerate(used):
        chunk = tokens[ordinal * T * 4 : (ordinal + 1) * T * 4]
        assert peers.say(worker, [pool_ipc.COMMIT, key, ordinal, slab, chunk, 7]) == [
            (worker, [pool_ipc.COMMITTED, key, []])]  # fmt: skip
    return used


# ---- right peers ---------------------------------------------------------------------------------------------------


def test_a_request_from_attach_to_release(peers):
    tokens = ids(3)
    assert peers.say(A, [pool_ipc.ATTACH, 5, wanted(tokens)]) == [(A, [pool_ipc.ATTACHED, 5, 0, []])]
    peers.say(A, [pool_ipc.RELEASE, 5])
    first, second = compute(peers, A, 6, tokens, 2)
    peers.say(A, [pool_ipc.RELEASE, 6])
    assert peers.pool.counts()["cached"] == 2
    answer = peers.say(B, [pool_ipc.ATTACH, 7, wanted(tokens)])
    assert answer == [(B, [pool_ipc.ATTACHED, 7, 2 * T, [(0, first, None), (1, second, None)]])]
    assert peers.killed() == []


def test_a_prefix_that_is_being_computed_is_waited_for(peers):
    tokens = ids(2)
    peers.say(A, [pool_ipc.ATTACH, 1, wanted(tokens)])
    assert peers.say(B, [pool_ipc.ATTACH, 2, wanted(tokens)]) == []
    (slab,) = peers.granted(A, 1)
    answers = peers.say(A, [pool_ipc.COMMIT, 1, 0, slab, tokens[: T * 4], 7])
    assert answers == [(A, [pool_ipc.COMMITTED, 1, []]), (B, [pool_ipc.ATTACHED, 2, T, [(0, slab, None)]])]


def test_scarce_slabs_are_shared_evenly_and_the_rest_comes_later(peers):
    for worker, n in ((A, 20), (B, 3)):
        peers.server.hear(worker, [pool_ipc.ALLOC, n], peers.now)
    grants = {peer: message[1] for peer, message in peers.turn()}
    assert {peer: len(slabs) for peer, slabs in grants.items()} == {A: 5, B: 3}
    ((peer, message),) = peers.say(B, [pool_ipc.GIVE, grants[B][:2]])
    assert (peer, message[0], sorted(message[1])) == (A, pool_ipc.GRANT, sorted(grants[B][:2]))


def test_the_dispatcher_is_told_of_a_shortage_until_it_is_over(peers):
    peers.server.introduce(DISPATCHER)
    slabs = peers.granted(A, SLABS)
    assert peers.say(B, [pool_ipc.ALLOC, 2]) == [(None, [pool_ipc.SHORT, 1, 2])]
    assert peers.turn() == []
    assert peers.say(B, [pool_ipc.ALLOC, 1]) == [(None, [pool_ipc.SHORT, 1, 3])]
    peers.server.introduce(DISPATCHER)  # another one
    assert peers.turn() == [(None, [pool_ipc.SHORT, 1, 3])]
    assert peers.say(A, [pool_ipc.GIVE, slabs[:3]])[1:] == [(None, [pool_ipc.RELIEVED, 1])]


def test_a_shortage_ends_with_its_worker(peers):
    peers.server.introduce(DISPATCHER)
    peers.granted(A, SLABS)
    peers.say(B, [pool_ipc.ALLOC, 2])
    peers.server.dead(B, False, peers.now)
    assert peers.turn() == [(None, [pool_ipc.RELIEVED, 1])]


def test_lookup_and_drop(peers):
    tokens = ids(3)
    compute(peers, A, 1, tokens, 2)
    peers.server.introduce(DISPATCHER)
    assert peers.say(None, [pool_ipc.LOOKUP, 9, wanted(tokens)]) == [(None, [pool_ipc.LOOKED, 9, 2 * T])]
    assert peers.say(None, [pool_ipc.LOOKUP, 9, wanted(tokens, salt=b"t")]) == [(None, [pool_ipc.LOOKED, 9, 0])]
    peers.server.dead(A, False, peers.now)
    assert peers.pool.counts()["committed"] == 2  # for whoever takes the request over
    peers.say(None, [pool_ipc.DROP, 1])
    assert peers.pool.counts()["cached"] == 2


def test_requests_end_with_their_dispatcher(peers):
    peers.server.introduce(DISPATCHER)
    compute(peers, A, 1, ids(2), 1)
    peers.server.dead(A, False, peers.now)
    peers.server.lose(DISPATCHER, peers.now)
    peers.turn()
    assert peers.pool.counts()["committed"] == 0


def test_all_that_others_hold_is_verified_after_a_death_by_fault(peers):
    (slab,) = compute(peers, A, 1, ids(2), 1)
    peers.server.dead(B, False, peers.now)
    assert peers.turn() == []
    peers.join((1, 2))
    peers.server.dead((1, 2), True, peers.now)
    assert peers.turn() == [(A, [pool_ipc.VERIFY, [(slab, 7)]])]
    peers.say(A, [pool_ipc.BAD, slab])
    assert peers.pool.counts()["quarantined"] == 1


def test_stats_on_change_and_not_too_often(peers):
    peers.server.introduce(DISPATCHER)

    def stats() -> list[dict[str, float]]:
        peers.server.turn(peers.now)
        out, peers.server.out = peers.server.out, []
        return [message[1] for _, message in out if message[0] == pool_ipc.STATS]

    (told,) = stats()
    assert sum(told[f'kv_slabs{{state="{state}"}}'] for state in peers.pool.counts()) == SLABS
    assert stats() == []
    peers.server.hear(A, [pool_ipc.ALLOC, 1], peers.now)
    assert stats() == []
    assert peers.server.due == pytest.approx(peers.now + STATS_SECONDS)
    peers.now = peers.server.due
    (told,) = stats()
    assert (told['kv_slabs{state="leased"}'], told['kv_leases{worker="0"}']) == (1, 1)
    peers.now += STATS_SECONDS
    assert stats() == []
    assert peers.server.due == float("inf")
    peers.server.hear(A, [pool_ipc.ALLOC, 1], peers.now)
    assert len(stats()) == 1


# ---- peers that are not right --------------------------------------------------------------------------------------

REQUEST = wanted(ids(2))
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


# ---- after the pool's own death ------------------------------------------------------------------------------------


def reborn(journal: Journal) -> Peers:
    return Peers(journal, (A, B))


@pytest.fixture
def journal() -> Journal:
    return Journal(memoryview(bytearray(Journal.size(SLABS, T))), SLABS, T, b"identity")


def test_nothing_is_granted_before_all_have_declared(journal):
    tokens = ids(3)
    before = Peers(journal)
    before.join(A)
    before.join(B)
    used = compute(before, A, 1, tokens, 2)
    spare = before.granted(A, 1)

    after = reborn(journal)
    after.server.introduce(DISPATCHER)
    assert after.join(B) == []
    assert after.say(B, [pool_ipc.ALLOC, SLABS]) == []  # and no shortage either
    held = {1: [wanted(tokens), [[0, used[0]], [1, used[1]]]]}
    ((peer, message), shortage) = after.join(A, spare, held)
    assert (peer, message[0], len(message[1])) == (B, pool_ipc.GRANT, SLABS - 3)
    assert not {*used, *spare} & {*message[1]}
    assert shortage == (None, [pool_ipc.SHORT, 1, 3])
    assert after.say(A, [pool_ipc.COMMIT, 1, 2, spare[0], tokens[2 * T * 4 :], 7])[0] == (
        A, [pool_ipc.COMMITTED, 1, []])  # fmt: skip
    assert after.killed() == []


def test_a_worker_that_does_not_declare_is_killed(journal):
    after = reborn(journal)
    after.join(A)
    assert after.say(A, [pool_ipc.ALLOC, 1]) == []
    assert after.server.due <= after.now + SETTLE
    assert after.turn(SETTLE) == []
    assert after.killed() == [("worker", *B)]
    assert after.turn() == []
    after.server.dead(B, False, after.now)
    ((peer, message),) = after.turn()
    assert (peer, message[0]) == (A, pool_ipc.GRANT)


@pytest.mark.parametrize(
    ("leased", "held"),
    [
        ([0, 0], {}),
        ([SLABS], {}),
        (["x"], {}),
        ([0], {1: [REQUEST, [[0, 0]]]}),
        ([], {1: [REQUEST, [[0, 1], [0, 2]]]}),
        ([], {1: [REQUEST, [[1, 1], [0, 2]]]}),
        ([], {1: [REQUEST, [7]]}),
        ([], {"x": [REQUEST, []]}),
        ([], {1: [REQUEST, [[0, SLABS]]]}),
    ],
)
def test_a_bad_declaration(journal, leased, held):
    """Killed; what it has is not granted to others before it is dead."""
    after = reborn(journal)
    after.join(B)
    assert after.join(A, leased, held) == []
    assert after.killed() == [("worker", *A)]
    assert after.say(B, [pool_ipc.ALLOC, SLABS]) == []
    after.server.dead(A, False, after.now)
    ((_, message),) = after.turn()
    assert len(message[1]) == SLABS


def test_two_declare_the_same_slab(journal):
    after = reborn(journal)
    after.join(A, [3])
    after.join(B, [3])
    assert after.killed() == [("worker", *B)]


# ---- anything at all -----------------------------------------------------------------------------------------------

FIELD = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 12) | st.integers(0, 1 << 66) | st.binary(max_size=70)
    | st.text(max_size=5) | st.floats() | st.sampled_from([REQUEST, REQUEST["tokens"][: T * 4], GEOMETRY, *hello(A)]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
TAGS = [value for name, value in vars(pool_ipc).items() if name.isupper()]
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


def test_every_message_has_a_handler():
    assert set(server._OF_WORKER) == {tag for tag in TAGS if tag < 16}
    assert set(server._OF_DISPATCHER) == {tag for tag in TAGS if 32 <= tag < 48}
