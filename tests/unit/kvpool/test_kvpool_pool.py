"""The pool's verbs, one story each; every order of them is test_pool_machine.py's."""

from __future__ import annotations

from struct import pack

import pytest
from colibri_daemon.kvpool.check import check
from colibri_daemon.kvpool.journal import Journal
from colibri_daemon.kvpool.messages import Attached, PeerFault, Request, Waiting
from colibri_daemon.kvpool.pool import Pool

T = 4
A, B, C = (0, 1), (1, 1), (2, 1)
PROMPT = list(range(1, 18))  # four slabs and a token


def made(slabs: int = 16, **options: object) -> Pool:
    pool = Pool(slabs, T, "lru", b"model", **options)  # type: ignore[arg-type]
    for worker in (A, B, C):
        pool.declare(worker, [], {}, 0.0)
    return pool


def request(tokens: list[int], **options: object) -> Request:
    return Request(pack(f"<{len(tokens)}I", *tokens), limit=len(tokens) - 1, **options)  # type: ignore[arg-type]


def compute(pool: Pool, worker: tuple[int, int], key: int, tokens: list[int], first: int, last: int) -> list[Attached]:
    """Commits ordinals first to last; returns the woken."""
    woken = []
    for ordinal in range(first, last + 1):
        (slab,) = pool.alloc(worker, 1)
        chunk = pack(f"<{T}I", *tokens[ordinal * T : ordinal * T + T])
        woken += pool.commit(worker, key, ordinal, slab, chunk, slab, 0.0).woken
    return woken


def fault(pool: Pool, worker: tuple[int, int]) -> None:
    """It dies of one, long after the last commit."""
    pool.suspect(1.0)
    pool.worker_dead(worker, 2.0)


def test_a_prefix_is_computed_once_by_whoever_asks_first() -> None:
    pool = made()
    first, second = pool.attach(A, 1, request(PROMPT), 0.0), pool.attach(B, 2, request(PROMPT), 0.0)
    other = pool.attach(C, 3, request([*PROMPT[:8], 99, 98, 97, 96, 95]), 0.0)
    assert isinstance(first, Attached)
    assert first.n == 0
    assert (second, other) == (Waiting(B, 2), Waiting(C, 3))
    assert [(w.key, w.n) for w in compute(pool, A, 1, PROMPT, 0, 1)] == [(3, 8)]  # all that it shares
    assert [(w.key, w.n) for w in compute(pool, A, 1, PROMPT, 2, 3)] == [(2, 16)]
    assert pool.counts()["committed"] == 4


@pytest.mark.parametrize("end", ["release", "die"])
def test_when_the_owner_ends_one_waiter_takes_over(end: str) -> None:
    pool = made()
    for worker, key in ((A, 1), (B, 2), (C, 3)):
        pool.attach(worker, key, request(PROMPT), 0.0)
    compute(pool, A, 1, PROMPT, 0, 0)
    woken = pool.release(A, 1, 0.0) if end == "release" else pool.worker_dead(A, 0.0)
    assert [(w.key, w.n) for w in woken] == [(2, T)]
    assert [(w.key, w.n) for w in compute(pool, B, 2, PROMPT, 1, 3)] == [(3, 16)]


def test_salts_and_private_requests_share_nothing_and_wait_for_nobody() -> None:
    pool = made()
    pool.attach(A, 1, request(PROMPT, salt=b"x"), 0.0)
    for key, other in ((2, request(PROMPT, salt=b"y")), (3, request(PROMPT, salt=b"x", use=False))):
        assert pool.attach(B, key, other, 0.0) == Attached(B, key, 0, [])
    compute(pool, A, 1, PROMPT, 0, 3)
    compute(pool, B, 3, PROMPT, 0, 3)
    assert pool.lookup(request(PROMPT, salt=b"x")) == 16
    assert pool.lookup(request(PROMPT, salt=b"y")) == pool.lookup(request(PROMPT, salt=b"x", use=False)) == 0
    pool.release(B, 3, 0.0)
    assert pool.counts() == {"free": 12, "leased": 0, "committed": 4, "cached": 0, "quarantined": 0,
                             "withheld": 0}


def test_another_worker_takes_a_dead_ones_request_over() -> None:
    pool = made()
    pool.attach(A, 1, request(PROMPT, use=False), 0.0)
    compute(pool, A, 1, PROMPT, 0, 2)
    pool.alloc(A, 2)
    pool.worker_dead(A, 0.0)
    assert pool.counts()["leased"] == 0
    answer = pool.attach(B, 1, request([*PROMPT, 5, 6]), 0.0)
    assert isinstance(answer, Attached)
    assert (answer.n, [crc for *_, crc in answer.slabs]) == (12, [None] * 3)
    pool.worker_dead(B, 0.0)
    pool.drop(1, 0.0)
    assert pool.counts()["free"] == 16


@pytest.mark.parametrize("early", [True, False])
def test_a_dropped_request_leaves_no_orphan_in_whatever_order(early: bool) -> None:
    """The drop may overtake both the attach of a worker that is dead already and the news of its death."""
    pool = made()
    pool.attach(B, 7, request(PROMPT), 0.0)
    compute(pool, B, 7, PROMPT, 0, 3)
    if early:
        pool.drop(1, 0.0)
    pool.attach(A, 1, request(PROMPT), 0.0)
    if not early:
        pool.drop(1, 0.0)
    pool.worker_dead(A, 0.0)
    pool.release(B, 7, 0.0)
    assert pool.counts()["committed"] == 0


def test_after_a_fault_crcs_are_verified_until_somebody_has() -> None:
    pool = made()
    pool.attach(A, 1, request(PROMPT), 0.0)
    compute(pool, A, 1, PROMPT, 0, 3)
    fault(pool, C)
    assert pool.to_verify(A) == [(slab, slab) for slab in sorted(pool.workers[A].sequences[1].slabs.values())]
    answer = pool.attach(B, 2, request(PROMPT), 0.0)
    assert isinstance(answer, Attached)
    assert all(crc == slab for _, slab, crc in answer.slabs)
    compute(pool, B, 2, [*PROMPT, 1, 2, 3], 4, 4)  # so they were right
    assert all(crc is None for *_, crc in pool.attach(B, 3, request(PROMPT), 0.0).slabs)  # type: ignore[union-attr]
    bad = answer.slabs[1][1]
    pool.bad(A, bad)
    assert (pool.counts()["quarantined"], pool.counters.get("kv_quarantined_total")) == (1, 1)
    assert pool.lookup(request(PROMPT)) == T
    assert check(pool) == []


def test_nothing_finds_what_may_have_been_computed_from_damage() -> None:
    pool = made()
    pool.attach(A, 1, request(PROMPT), 0.0)
    compute(pool, A, 1, PROMPT, 0, 3)
    fault(pool, C)
    pool.bad(A, pool.workers[A].sequences[1].slabs[1])
    pool.release(A, 1, 0.0)
    pool.attach(A, 1, request(PROMPT), 0.0)
    for last, found in enumerate((1, 2, 3, 4)):
        if last:
            compute(pool, A, 1, PROMPT, last, last)
        assert pool.lookup(request(PROMPT)) == found * T
        assert check(pool) == []
    assert pool.counts() == {"free": 11, "leased": 0, "committed": 4, "cached": 0, "quarantined": 1,
                             "withheld": 0}


def test_one_of_two_copies_is_damaged() -> None:
    """What is behind them has been computed from either."""
    pool = made()
    for worker, key in ((A, 1), (B, 2)):
        pool.attach(worker, key, request(PROMPT[: T - 1]), 0.0)
    for worker, key in ((A, 1), (B, 2)):
        compute(pool, worker, key, PROMPT, 0, 0)
    pool.release(A, 1, 0.0)
    assert pool.lookup(request(PROMPT)) == T
    pool.bad(B, pool.workers[B].sequences[2].slabs[0])
    assert pool.lookup(request(PROMPT)) == 0
    assert pool.counts() == {"free": 15, "leased": 0, "committed": 0, "cached": 0, "quarantined": 1,
                             "withheld": 0}
    assert check(pool) == []


def test_what_is_cached_makes_room_deepest_first() -> None:
    pool = made(slabs=4)
    pool.attach(A, 1, request(PROMPT), 0.0)
    compute(pool, A, 1, PROMPT, 0, 3)
    pool.release(A, 1, 1.0)
    assert len(pool.alloc(B, 2)) == 2
    assert pool.lookup(request(PROMPT)) == 8
    assert pool.counters.get("kv_evictions_total", reason="lru") == 2
    assert len(pool.alloc(B, 9)) == 2
    assert (pool.available, pool.alloc(B, 1)) == (0, [])


def test_a_use_moves_a_slab_to_the_end_of_the_queue() -> None:
    pool = made(slabs=4)
    other = [token + 50 for token in PROMPT]
    for now, (key, tokens) in enumerate([(1, PROMPT), (2, other)]):
        pool.attach(A, key, request(tokens), now)
        compute(pool, A, key, tokens, 0, 1)
        pool.release(A, key, now)
    pool.attach(A, 3, request(PROMPT), 2.0)
    pool.release(A, 3, 2.0)
    pool.alloc(B, 2)
    assert (pool.lookup(request(PROMPT)), pool.lookup(request(other))) == (8, 0)


def test_a_restarted_pool_knows_what_is_cached_and_grants_once_all_have_declared() -> None:
    memory = bytearray(Journal.size(16, T))
    pool = made(journal=Journal(memoryview(memory), 16, T, b"model"))
    pool.attach(A, 1, request(PROMPT), 0.0)
    compute(pool, A, 1, PROMPT, 0, 2)
    leased, held = pool.alloc(A, 2), list(pool.workers[A].sequences[1].slabs.items())
    again = Pool(16, T, "lru", b"model", Journal(memoryview(memory), 16, T, b"model"), [A, B])
    again.declare(B, [], {}, 0.0)
    assert again.lookup(request(PROMPT)) == 12
    assert (again.settling, again.alloc(B, 1)) == (True, [])
    with pytest.raises(PeerFault):
        again.declare(A, [*leased, held[0][1]], {}, 0.0)
    again.declare(A, leased, {1: (request(PROMPT), held)}, 0.0)
    assert (again.counts()["leased"], again.counts()["committed"]) == (2, 3)
    compute(again, A, 1, PROMPT, 3, 3)
    assert again.lookup(request(PROMPT)) == 16
    assert len(again.alloc(B, 1)) == 1


@pytest.mark.parametrize("use", [True, False])
def test_a_commit_that_the_dead_pool_did_not_come_to_is_sent_again(use: bool) -> None:
    memory = bytearray(Journal.size(16, T))
    pool = made(journal=Journal(memoryview(memory), 16, T, b"model"))
    pool.attach(A, 1, request(PROMPT, use=use), 0.0)
    (slab,) = pool.alloc(A, 1)
    again = Pool(16, T, "lru", b"model", Journal(memoryview(memory), 16, T, b"model"), [A, B])
    again.declare(A, [], {1: (request(PROMPT, use=use), [(0, slab)])}, 0.0)
    first = pack(f"<{T}I", *PROMPT[:T])
    with pytest.raises(PeerFault):
        again.commit(A, 1, 0, slab + 1, first, 5, 0.0)
    again.commit(A, 1, 0, slab, first, 5, 0.0)
    with pytest.raises(PeerFault):
        again.commit(A, 1, 0, slab, first, 5, 0.0)
    assert again.lookup(request(PROMPT)) == (T if use else 0)
    again.declare(B, [], {}, 0.0)
    compute(again, A, 1, PROMPT, 1, 1)
    again.worker_dead(A, 0.0)
    answer = again.attach(B, 1, request(PROMPT, use=use), 0.0)
    assert isinstance(answer, Attached)
    assert answer.n == 2 * T


def test_a_restarted_pool_keeps_private_slabs_for_who_may_still_declare_them() -> None:
    memory = bytearray(Journal.size(16, T))
    pool = made(journal=Journal(memoryview(memory), 16, T, b"model"))
    pool.attach(A, 1, request(PROMPT, use=False), 0.0)
    compute(pool, A, 1, PROMPT, 0, 2)
    held = list(pool.workers[A].sequences[1].slabs.items())
    again = Pool(16, T, "lru", b"model", Journal(memoryview(memory), 16, T, b"model"), [A, B, C])
    again.declare(B, [], {}, 0.0)
    again.worker_dead(C, 0.0)
    again.declare(A, [], {1: (request(PROMPT, use=False), held)}, 0.0)
    again.worker_dead(A, 0.0)
    answer = again.attach(B, 1, request(PROMPT, use=False), 0.0)
    assert isinstance(answer, Attached)
    assert answer.slabs == [(ordinal, slab, slab) for ordinal, slab in held]  # with their CRCs: nobody knows them
    full = Pool(16, T, "lru", b"model", Journal(memoryview(memory), 16, T, b"model"))
    assert full.counts()["free"] == 16


def test_a_worker_that_declares_another_ones_slabs_gets_nothing_indexed_under_that_salt() -> None:
    memory = bytearray(Journal.size(16, T))
    pool = made(journal=Journal(memoryview(memory), 16, T, b"model"))
    pool.attach(A, 1, request(PROMPT, salt=b"x"), 0.0)
    compute(pool, A, 1, PROMPT, 0, 0)
    again = Pool(16, T, "lru", b"model", Journal(memoryview(memory), 16, T, b"model"), [A, B])
    again.declare(A, [], {}, 0.0)
    again.declare(B, [], {9: (request(PROMPT, salt=b"y"), [(0, pool.workers[A].sequences[1].slabs[0])])}, 0.0)
    compute(again, B, 9, PROMPT, 1, 3)
    assert again.lookup(request(PROMPT, salt=b"x")) == T
    assert again.lookup(request(PROMPT, salt=b"y")) == 0


def test_a_slab_declared_in_another_place_than_it_was_written_for_is_not_taken_over() -> None:
    memory, same = bytearray(Journal.size(16, T)), [7] * 17
    pool = made(journal=Journal(memoryview(memory), 16, T, b"model"))
    pool.attach(A, 1, request(same, use=False), 0.0)
    compute(pool, A, 1, same, 0, 1)
    slabs = pool.workers[A].sequences[1].slabs
    again = Pool(16, T, "lru", b"model", Journal(memoryview(memory), 16, T, b"model"), [A, B])
    again.declare(A, [], {1: (request(same, use=False), [(0, slabs[1]), (1, slabs[0])])}, 0.0)
    again.declare(B, [], {}, 0.0)
    assert again.attach(B, 1, request(same, use=False), 0.0) == Attached(B, 1, 0, [])


def test_a_slot_has_two_workers_while_a_reload_lasts() -> None:
    pool, later = made(), (A[0], 2)
    pool.attach(A, 1, request(PROMPT), 0.0)
    pool.declare(later, [], {}, 0.0)
    compute(pool, A, 1, PROMPT, 0, 0)
    pool.release(A, 1, 0.0)
    answer = pool.attach(later, 1, request(PROMPT), 0.0)
    assert isinstance(answer, Attached)
    assert answer.n == T
    with pytest.raises(PeerFault):
        pool.declare(A, [], {}, 0.0)
    pool.worker_dead(A, 0.0)
    compute(pool, later, 1, PROMPT, 1, 2)
    for verb in (lambda: pool.alloc(A, 1), lambda: pool.attach(A, 2, request(PROMPT), 0.0),
                 lambda: pool.declare(A, [], {}, 0.0)):  # its words came after its death
        with pytest.raises(PeerFault):
            verb()


def test_an_older_worker_declares_after_a_newer_one() -> None:
    """To a pool that was started again during a reload."""
    pool = Pool(16, T, "lru", b"model", workers=[A, (A[0], 2)])
    pool.declare((A[0], 2), [], {}, 0.0)
    pool.declare(A, [3], {}, 0.0)
    assert not pool.settling
    assert pool.leases() == {A: 1, (A[0], 2): 0}


def test_a_request_does_not_wait_for_the_worker_that_lost_it() -> None:
    pool = made()
    pool.attach(A, 1, request(PROMPT), 0.0)
    assert pool.attach(B, 2, request(PROMPT), 0.0) == Waiting(B, 2)
    assert isinstance(pool.attach(C, 1, request(PROMPT), 0.0), Attached)
    assert pool.release(A, 1, 0.0) == []  # request 2 waits for C now
    assert [w.key for w in compute(pool, C, 1, PROMPT, 0, 3)] == [2]


@pytest.mark.parametrize("change", ["tokens", "salt", "positions", "dispatcher"])
def test_only_the_same_request_is_taken_over(change: str) -> None:
    pool = made()
    mask = {"pinned": T, "window": T}
    pool.attach(A, 1, request(PROMPT, use=False, **mask), 0.0)
    compute(pool, A, 1, PROMPT, 0, 2)
    if change == "dispatcher":
        pool.dispatcher_dead(0.0)
    other = {
        "tokens": request([9, *PROMPT[1:]], use=False, **mask),
        "salt": request(PROMPT, use=False, salt=b"y", **mask),
        "positions": request(PROMPT, use=False, positions="absolute", **mask),
        "dispatcher": request(PROMPT, use=False, **mask),
    }
    answer = pool.attach(B, 1, other[change], 0.0)
    assert isinstance(answer, Attached)
    assert answer.n == 0


def test_requests_wait_only_as_far_as_their_masks_are_the_same() -> None:
    pool = made()
    pool.attach(A, 1, request(PROMPT), 0.0)
    assert pool.attach(B, 2, request(PROMPT, pinned=T, window=T), 0.0) == Waiting(B, 2)
    assert [(w.key, w.n) for w in compute(pool, A, 1, PROMPT, 0, 1)] == [(2, 2 * T)]


def test_a_fault_after_an_attach_makes_its_slabs_suspect_again() -> None:
    pool = made()
    pool.attach(A, 1, request(PROMPT), 0.0)
    compute(pool, A, 1, PROMPT, 0, 3)
    fault(pool, C)
    pool.attach(B, 2, request(PROMPT), 0.0)
    pool.declare((C[0], 2), [], {}, 0.0)
    fault(pool, (C[0], 2))
    compute(pool, B, 2, [*PROMPT, 1, 2, 3], 4, 4)
    answer = pool.attach(B, 3, request(PROMPT), 0.0)
    assert isinstance(answer, Attached)
    assert all(crc is not None for *_, crc in answer.slabs)


def test_two_that_declare_one_lease_are_not_both_believed() -> None:
    pool = Pool(16, T, "lru", b"model", workers=[A, B])
    pool.declare(A, [3, 4], {}, 0.0)
    for leased, held in (([4], {}), ([], {1: (request(PROMPT), [(0, 4)])}), ([5, 5], {}), ([99], {})):
        with pytest.raises(PeerFault):
            pool.declare(B, leased, held, 0.0)
    pool.declare(B, [5], {1: (request(PROMPT), [(0, 6)])}, 0.0)
    assert check(pool) == []


@pytest.mark.parametrize("body", [
    None, 5, {"tokens": "text"}, {"tokens": b"123"}, {"salt": 1}, {"window": -1}, {"pinned": True}, {"use": 1},
    {"positions": "relative"}, {"limit": 1}, {"more": 1}, {"positions": ["cache"]},
])  # fmt: skip
def test_no_requests(body: object) -> None:
    with pytest.raises(PeerFault):
        Request.from_wire(body)


def test_a_commit_of_other_tokens_than_the_requests_is_refused() -> None:
    pool = made()
    pool.attach(A, 1, request(PROMPT), 0.0)
    (slab,) = pool.alloc(A, 1)
    with pytest.raises(PeerFault, match="other tokens"):
        pool.commit(A, 1, 0, slab, bytes(4 * T), 0, 0.0)
    assert check(pool) == []
