"""What the pool answers its peers, and how it starts again after its own death."""

from __future__ import annotations

import pytest
from colibri_daemon.common import pool_ipc
from colibri_daemon.kvpool import server
from colibri_daemon.kvpool.journal import Journal
from colibri_daemon.kvpool.messages import Request
from colibri_daemon.kvpool.server import STATS_SECONDS, SUSPECT_SECONDS
from pooled import DISPATCHER, REQUEST, SETTLE, SLABS, TAGS, A, B, Peers, T, compute, ids, wanted


def test_every_message_has_a_handler():
    assert set(server._OF_WORKER) == {tag for tag in TAGS if tag < 16}
    assert set(server._OF_DISPATCHER) == {tag for tag in TAGS if 32 <= tag < 48}


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
    assert peers.say(B, [pool_ipc.ALLOC, 2]) == [(None, [pool_ipc.SHORT, B, 2])]
    assert peers.turn() == []
    assert peers.say(B, [pool_ipc.ALLOC, 1]) == [(None, [pool_ipc.SHORT, B, 3])]
    peers.server.introduce(DISPATCHER)  # another one
    assert peers.turn() == [(None, [pool_ipc.SHORT, B, 3])]
    assert peers.say(A, [pool_ipc.GIVE, slabs[:3]])[1:] == [(None, [pool_ipc.RELIEVED, B])]


def test_a_shortage_ends_with_its_worker(peers):
    peers.server.introduce(DISPATCHER)
    peers.granted(A, SLABS)
    peers.say(B, [pool_ipc.ALLOC, 2])
    peers.server.dead(B, False, peers.now)
    assert peers.turn() == [(None, [pool_ipc.RELIEVED, B])]


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
    peers.join((2, 1))
    peers.now += SUSPECT_SECONDS + 1
    peers.server.dead((1, 2), True, peers.now)
    assert peers.turn() == [(A, [pool_ipc.VERIFY, [(slab, 7)]]), ((2, 1), [pool_ipc.VERIFY, []])]
    peers.say(A, [pool_ipc.BAD, slab], [pool_ipc.VERIFIED])
    assert peers.pool.counts()["quarantined"] == 1


def test_what_was_committed_shortly_before_a_fault_is_computed_again(peers):
    """It may be made of damage, with the right CRC; and so may be what was on its way when the worker was told."""
    tokens = ids(4)
    (old,) = compute(peers, A, 1, tokens, 1)
    compute(peers, A, 2, ids(2, seed=2), 1)
    peers.say(A, [pool_ipc.RELEASE, 2])
    peers.now += SUSPECT_SECONDS + 1
    young, late = peers.granted(A, 2)
    commits = [[pool_ipc.COMMIT, 1, n, slab, tokens[n * T * 4 : (n + 1) * T * 4], 7]
               for n, slab in ((1, young), (2, late))]  # fmt: skip
    peers.say(A, commits[0])
    peers.server.lose(B, peers.now)  # its fault was before its link's end
    peers.now += 0.9
    peers.server.dead(B, True, peers.now)
    assert peers.turn() == [(A, [pool_ipc.VERIFY, sorted([(old, 7), (young, None)])])]
    assert peers.say(A, commits[1]) == [(A, [pool_ipc.COMMITTED, 1, []])]
    assert peers.pool.lookup(Request(**wanted(tokens))) == T
    answer = peers.say(A, [pool_ipc.RELEASE, 1], [pool_ipc.ATTACH, 1, wanted(tokens)], [pool_ipc.VERIFIED])
    assert answer == [(A, [pool_ipc.ATTACHED, 1, T, [(0, old, 7)]])]
    assert peers.pool.counts() == {"free": SLABS - 2, "leased": 0, "committed": 1, "cached": 1, "quarantined": 0,
                                     "withheld": 0}
    (slab,) = peers.granted(A, 1)
    peers.say(A, [pool_ipc.COMMIT, 1, 1, slab, tokens[T * 4 : 2 * T * 4], 7])
    assert peers.pool.lookup(Request(**wanted(tokens))) == 2 * T
    assert peers.killed() == []


def test_who_declares_after_a_fault_is_told_of_it(journal):
    """One that the former pool had not been told of, or that came while the new one was settling."""
    tokens = ids(2)
    before = Peers(journal)
    for worker in (A, B):
        before.join(worker)
    (slab,) = compute(before, A, 1, tokens, 1)
    held = {1: [wanted(tokens), [[0, slab]]]}
    after = reborn(journal)
    after.server.missed(before.now)
    assert after.join(A, held=held) == [(A, [pool_ipc.VERIFY, [(slab, None)]])]
    again = reborn(journal)
    again.now += SUSPECT_SECONDS + 1
    again.server.dead(B, True, again.now)
    assert again.turn() == []
    assert again.join(A, held=held) == [(A, [pool_ipc.VERIFY, [(slab, None)]])]  # the record is gone with the first
    assert after.killed() == again.killed() == []


def test_a_request_goes_on_elsewhere_once_its_worker_has_let_it_go(peers):
    """The end of a dead worker's link may come after others know of its death."""
    tokens = ids(2)
    (slab,) = compute(peers, A, 1, tokens, 1)
    assert peers.say(B, [pool_ipc.ATTACH, 1, wanted(tokens)]) == []
    assert peers.say(B, [pool_ipc.ATTACH, 2, wanted(ids(1, seed=2))]) == [(B, [pool_ipc.ATTACHED, 2, 0, []])]
    assert peers.say(A, [pool_ipc.RELEASE, 1]) == [(B, [pool_ipc.ATTACHED, 1, T, [(0, slab, None)]])]
    compute(peers, A, 3, ids(2, seed=3), 1)
    peers.server.introduce(DISPATCHER)
    peers.say(DISPATCHER, [pool_ipc.DROP, 3])  # what the dispatcher has done with is nobody's to wait for
    assert peers.say(B, [pool_ipc.ATTACH, 3, wanted(ids(1, seed=4))]) == [(B, [pool_ipc.ATTACHED, 3, 0, []])]


@pytest.mark.parametrize("fault", [False, True])
def test_nobody_attaches_while_a_worker_is_ending(peers, fault):
    """Before it is known how it ended: its requests are another's as soon as its link has ended."""
    (slab,) = compute(peers, A, 1, ids(2), 1)
    peers.now += SUSPECT_SECONDS + 1
    peers.server.hear(B, [pool_ipc.ATTACH, 1, wanted(ids(2))], peers.now)
    peers.server.lose(A, peers.now)
    assert peers.turn() == []
    peers.server.dead(A, fault, peers.now)
    answer = (B, [pool_ipc.ATTACHED, 1, T, [(0, slab, 7 if fault else None)]])
    assert peers.turn() == [(B, [pool_ipc.VERIFY, []]), answer] if fault else [answer]


def test_who_was_killed_leaves_its_requests_at_once_and_its_leases_later(peers):
    """And with its last words: the caller hears them before the turn ends."""
    tokens = ids(3)
    first, second = compute(peers, A, 1, tokens, 2)
    kept = peers.granted(A, 1)
    peers.say(B, [pool_ipc.ATTACH, 2, wanted(tokens)], [pool_ipc.ATTACH, 3, wanted(ids(3, seed=2))])
    peers.server.introduce(DISPATCHER)
    peers.server.hear(DISPATCHER, [pool_ipc.KILLED, list(A)], peers.now)
    peers.server.hear(B, [pool_ipc.ATTACH, 1, wanted(tokens)], peers.now)
    assert peers.server.killed == [A]
    peers.server.hear(A, [pool_ipc.COMMIT, 1, 2, kept[0], tokens[2 * T * 4 :], 7], peers.now)
    peers.server.lose(A, peers.now)
    said = [message for peer, message in peers.turn() if peer == B]
    assert said == [[pool_ipc.ATTACHED, 1, 2 * T, [(0, first, None), (1, second, None)]]]
    assert peers.pool.counts()["committed"] + peers.pool.counts()["cached"] == 3
    assert peers.killed() == []
    assert peers.say(A, [pool_ipc.ALLOC, 1]) == []


def test_the_leases_of_who_was_killed_return_when_it_is_dead(peers):
    peers.server.introduce(DISPATCHER)
    peers.granted(A, 3)
    peers.say(DISPATCHER, [pool_ipc.KILLED, list(A)])
    assert peers.pool.counts()["leased"] == 3  # other threads of it may still write
    peers.turn(SETTLE)
    assert (peers.pool.counts()["leased"], peers.killed()) == (3, [])
    peers.server.dead(A, False, peers.now)
    assert peers.pool.counts()["leased"] == 0
    peers.say(DISPATCHER, [pool_ipc.KILLED, list(A)], [pool_ipc.KILLED, [77, 1]])  # late; never known
    assert peers.killed() == []


def test_a_killed_worker_that_has_not_declared_is_waited_for(peers):
    """The pool is a new one and does not know yet what that worker has."""
    again = Peers(survivors=(A, B))
    again.join(B)
    again.server.introduce(DISPATCHER)
    assert again.say(DISPATCHER, [pool_ipc.KILLED, list(A)]) == []
    assert again.pool.settling
    again.server.dead(A, False, again.now)
    assert not again.pool.settling


@pytest.mark.parametrize("worker", [7, [0], [0, 1, 2], [0, -1], ["x", 1], None])
def test_no_worker_that_was_killed(peers, worker):
    peers.server.introduce(DISPATCHER)
    assert peers.say(DISPATCHER, [pool_ipc.KILLED, worker]) == []
    assert peers.killed() == [("dispatcher", 0, 0)]
    assert len(peers.granted(A, 1)) == 1


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
    assert shortage == (None, [pool_ipc.SHORT, B, 3])
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
