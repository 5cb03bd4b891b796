"""The pool's part in a reload: slabs that may not be used yet, a pool that gives its memory back, what is dropped on
the administrator's word."""

from __future__ import annotations

import mmap
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
from colibri_daemon.common import ipc, pool_ipc
from colibri_daemon.common.arena import Arena
from colibri_daemon.common.link import Link
from colibri_daemon.kvpool.journal import Journal
from colibri_daemon.kvpool.messages import PeerFault, Request
from fixtures.pool import PoolThread
from pooled import DISPATCHER, SLABS, A, B, Peers, T, compute, ids, wanted


def joined(**options: Any) -> Peers:
    peers = Peers(**options)
    peers.join(A)
    peers.join(B)
    return peers


def held(peers: Peers) -> list[int]:
    """What the supervisor is told."""
    told = [order["slabs"] for order in peers.server.orders if order["t"] == "held"]
    peers.server.orders.clear()
    return told


def test_slabs_that_are_not_usable_yet_are_not_granted() -> None:
    peers = joined(usable=3)
    assert peers.pool.counts()["withheld"] == SLABS - 3
    assert sorted(peers.granted(A, 5)) == [0, 1, 2]
    peers.server.grow(4)
    assert peers.turn() == [(A, [pool_ipc.GRANT, [3]])]
    peers.server.grow(SLABS)
    assert peers.turn() == [(A, [pool_ipc.GRANT, [4]])]
    assert peers.pool.counts() == {"free": SLABS - 5, "leased": 5, "committed": 0, "cached": 0, "quarantined": 0,
                                   "withheld": 0}


def test_a_retired_pool_gives_back_what_nobody_holds() -> None:
    peers = joined()
    compute(peers, A, 1, ids(2, seed=1), 1)
    peers.say(A, [pool_ipc.RELEASE, 1])
    (slab,) = compute(peers, A, 2, ids(2, seed=2), 1)
    peers.server.retire()
    peers.turn()
    assert sorted(peers.unused) == [number for number in range(SLABS) if number != slab]
    assert held(peers) == [SLABS, 1]
    (more,) = peers.granted(A, 1)  # a request that still runs goes on
    assert peers.unused == []
    assert peers.pool.counts()["withheld"] == SLABS - 2
    peers.say(A, [pool_ipc.GIVE, [more]])
    assert (peers.unused, held(peers)) == ([more], [1])
    peers.say(A, [pool_ipc.RELEASE, 2])
    assert (peers.unused, held(peers)) == ([slab], [0])
    assert peers.pool.counters.get("kv_evictions_total", reason="retire") == 2


def test_a_retired_pool_that_starts_again_waits_for_all_to_declare() -> None:
    journal = Journal(memoryview(bytearray(Journal.size(SLABS, T))), SLABS, T, b"identity")
    before = joined(journal=journal)
    (leased,) = before.granted(A, 1)
    after = Peers(journal, (A, B))
    after.server.retire()
    after.join(B)
    assert after.unused == []
    after.join(A, [leased])
    assert sorted(after.unused) == [number for number in range(SLABS) if number != leased]


def test_pages_come_and_go_with_the_supervisors_word() -> None:
    """Of the real memory."""
    facts: Any = SimpleNamespace(slab_bytes=2 * mmap.PAGESIZE, slab_tokens=T, kv_format="f32")
    thread = PoolThread(Arena.make(64, facts))
    control, sock = thread._control, thread.connect(0, 1)
    link = Link(sock)

    def pages() -> int:
        return os.fstat(thread.arena.fd).st_blocks * 512 // mmap.PAGESIZE

    try:
        thread._loop._usable = thread._loop._goal = 0
        assert ipc.send_control(control, {"t": "usable", "slabs": 40})
        thread.until(lambda: pages() == 80)
        hello = {"slot": 0, "epoch": 1, "geometry": thread.arena.geometry, "leased": [], "held": {}}
        link.send([pool_ipc.HELLO, hello], [pool_ipc.ALLOC, 3])
        thread.until(lambda: thread.pool.counts()["leased"] == 3)
        assert ipc.send_control(control, {"t": "retire"})
        thread.until(lambda: pages() == 6)
        told, deadline = [], time.monotonic() + 60
        while 3 not in told and time.monotonic() < deadline:
            try:
                packet = ipc.receive_control(control)
            except BlockingIOError:
                time.sleep(0)
                continue
            assert packet is not None
            told.append(packet[0].get("slabs"))
        assert told[-1] == 3
    finally:
        link.close()
        thread.close()


# ---- the administrator's word ----------------------------------------------------------------------------------------

OWNER, OTHER = b"o" * 16, b"p" * 16


def test_what_an_owner_has_is_dropped() -> None:
    peers = joined()
    peers.server.introduce(DISPATCHER)
    for key, salt in enumerate((OWNER + b"1" * 16, OWNER + b"2" * 16, OTHER + b"1" * 16, OWNER + b"1" * 16), 1):
        peers.say(A, [pool_ipc.ATTACH, key, wanted(ids(2, seed=key), salt=salt)])
        (slab,) = peers.granted(A, 1)
        peers.say(A, [pool_ipc.COMMIT, key, 0, slab, ids(2, seed=key)[: T * 4], 7])
        if key < 4:
            peers.say(A, [pool_ipc.RELEASE, key])
    assert peers.say(None, [pool_ipc.EVICT, 5, OWNER]) == [(None, [pool_ipc.EVICTED, 5, 2])]

    def found(key: int, salt: bytes) -> int:
        return peers.pool.lookup(Request(**wanted(ids(2, seed=key), salt=salt)))

    assert [found(1, OWNER + b"1" * 16), found(3, OTHER + b"1" * 16), found(4, OWNER + b"1" * 16)] == [0, T, 0]
    assert peers.pool.counts()["committed"] == 1  # a live request's stays
    assert peers.say(None, [pool_ipc.EVICT, 6, None]) == [(None, [pool_ipc.EVICTED, 6, 1])]
    assert peers.pool.counters.get("kv_evictions_total", reason="admin") == 3
    peers.say(A, [pool_ipc.RELEASE, 4])
    compute(peers, B, 9, ids(2, seed=1), 1)
    assert peers.killed() == []


@pytest.mark.parametrize("owner", [OWNER, None])
def test_what_a_dead_pool_left_is_anybodys(owner: bytes | None) -> None:
    journal = Journal(memoryview(bytearray(Journal.size(SLABS, T))), SLABS, T, b"identity")
    before = joined(journal=journal)
    compute(before, A, 1, ids(2), 1)
    after = Peers(journal)
    assert after.pool.counts()["cached"] == 1
    assert after.pool.evict(owner) == 1
    assert after.turn() == []


def test_an_owner_is_bytes() -> None:
    peers = joined()
    peers.server.introduce(DISPATCHER)
    peers.say(None, [pool_ipc.EVICT, 1, "o"])
    assert peers.killed() == [("dispatcher", 0, 0)]


def test_verified_without_having_been_told_to() -> None:
    peers = joined()
    with pytest.raises(PeerFault):
        peers.pool.verified(A)
