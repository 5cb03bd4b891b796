"""What the pool counts: in its page, so that it outlives the process; what it shows there and tells the dispatcher."""

from __future__ import annotations

from colibri_daemon.common import pool_ipc
from colibri_daemon.common.counters import LAYOUTS, Counters, read
from colibri_daemon.common.metrics import BY_NAME, Source
from colibri_daemon.common.pages import Page, make_pages
from colibri_daemon.kvpool.pool import Pool
from colibri_daemon.kvpool.server import Server
from colibri_daemon.kvpool.stats import stats
from pooled import DISPATCHER, GEOMETRY, SETTLE, SLABS, A, B, Peers, T, compute, ids, wanted


def with_page(page: Page) -> Peers:
    """Of a new pool, whose process has this page."""
    peers = Peers()
    counters = Counters(page.counters, Source.KVPOOL)
    peers.pool = Pool(SLABS, T, "lru", b"identity", now=peers.now, counters=counters)
    peers.server = Server(peers.pool, GEOMETRY, peers.now, SETTLE)
    for worker in (A, B):
        peers.join(worker)
    return peers


def test_counters_outlive_the_pool() -> None:
    (page,) = make_pages(1)
    peers = with_page(page)
    peers.server.introduce(DISPATCHER)
    tokens = ids(3)
    compute(peers, A, 1, tokens, 2)
    peers.say(A, [pool_ipc.RELEASE, 1])
    peers.say(B, [pool_ipc.ATTACH, 2, wanted(tokens)])
    peers.server.dead(A, False, peers.now)
    peers.turn(1.0)
    told = {name: number for name, number in stats(peers.pool).items() if "_total" in name}
    assert told["prefix_cache_hits_total"] == 2 * T
    again = with_page(page)
    assert stats(again.pool).items() >= told.items()
    assert again.pool.counts()["free"] == SLABS  # the slabs are the journal's business


def test_the_page_shows_what_the_slabs_are() -> None:
    (page,) = make_pages(1)
    peers = with_page(page)
    compute(peers, A, 1, ids(3), 2)
    peers.say(A, [pool_ipc.ALLOC, 1])
    shown = {state: peers.pool.counters.get("kv_slabs", state=state) for (state,) in BY_NAME["kv_slabs"].series}
    assert shown == {"live": 3, "cached": 0, "free": SLABS - 3, "quarantined": 0, "withheld": 0}
    peers.say(A, [pool_ipc.RELEASE, 1])
    assert peers.pool.counters.get("kv_slabs", state="cached") == 2
    assert read(page.counters, Source.KVPOOL) is not None


def observed(page: Page, name: str, *values: str) -> int:
    """How often."""
    words, first = read(page.counters, Source.KVPOOL), LAYOUTS[Source.KVPOOL].places[(name, *values)]
    assert words is not None
    return int(sum(words[first : first + BY_NAME[name].words - 1]))


def test_calls_and_lives_of_slabs_are_timed() -> None:
    (page,) = make_pages(1)
    peers = with_page(page)
    peers.server.introduce(DISPATCHER)
    tokens = ids(3)
    compute(peers, A, 1, tokens, 2)
    peers.say(A, [pool_ipc.RELEASE, 1])
    peers.say(None, [pool_ipc.LOOKUP, 1, wanted(tokens)])
    peers.turn(2.0)
    peers.say(B, [pool_ipc.ATTACH, 2, wanted(tokens)])
    peers.say(B, [pool_ipc.RELEASE, 2])
    peers.say(B, [pool_ipc.ALLOC, SLABS])
    assert [observed(page, "kv_call_duration_seconds", op) > 0
            for op in ("alloc", "attach", "commit", "release", "lookup")] == [True] * 5
    assert observed(page, "kv_block_reuse_gap_seconds") == 2
    assert observed(page, "kv_block_lifetime_seconds") == observed(page, "kv_block_idle_before_evict_seconds") == 2


def test_a_peer_at_fault_is_a_violation() -> None:
    (page,) = make_pages(1)
    peers = with_page(page)
    peers.say(A, [pool_ipc.GIVE, [0]])
    assert peers.pool.counters.get("kv_invariant_violations_total", kind="peer") == 1

