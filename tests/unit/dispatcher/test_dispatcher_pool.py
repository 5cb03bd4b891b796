"""The dispatcher and the KV pool: who gets a worker, what is asked and told. A slab has 16 tokens."""

from __future__ import annotations

import pytest
from colibri_daemon.common import ipc, pool_ipc
from colibri_daemon.dispatcher import pool_link
from colibri_protocol.errors import Code
from colibri_protocol.messages import Bye, Cache, Cancel, Done, Error, TokenCheck, TokenCheckReply, TokensOut
from dispatched import LONG, generate, ids, on_uvloop, prompt, rig, three, until

# ---- room ----------------------------------------------------------------------------------------------------------


@on_uvloop
async def test_free_and_cached_slabs_must_cover_prompt_and_one_of_output() -> None:
    async with rig(**LONG) as r:
        worker, client, pool = await three(r, free=64)
        await client.say(prompt(1), 1)
        first, _ = await worker.assigned()
        await worker.step([first, ids(9), None])
        await client.hear_a(TokensOut, 1)
        await pool.stats(free=3, cached=2)
        await until(lambda: r.pool_link.available == 5)
        await client.say(prompt(5), 2)
        await until(lambda: len(r.requests.queue))
        assert not worker.waiting()
        await pool.stats(free=3, cached=3)
        assert len((await worker.assigned())[1].tokens) == 4 * 80


@on_uvloop
async def test_what_was_promised_is_not_promised_twice_until_it_is_taken() -> None:
    async with rig(**LONG) as r:
        worker, client, pool = await three(r, free=10)
        for request_id in (1, 2, 3):
            await client.say(prompt(4), request_id)
        first, _ = await worker.assigned()
        await worker.assigned()
        await until(lambda: len(r.requests.queue))
        await pool.stats(free=12)  # it does not know of the promises
        await until(lambda: r.pool_link.available == 12)
        assert not worker.waiting()
        await worker.step([first, ids(9), None])  # has taken its slabs
        await worker.assigned()


@on_uvloop
async def test_all_workers_share_what_there_is() -> None:
    async with rig(**LONG) as r:
        workers = [await r.worker(slot=slot, slabs=64) for slot in range(2)]
        client, _ = await r.client(), await r.pool(free=7)
        for request_id in (1, 2):
            await client.say(prompt(4), request_id)
        await until(lambda: len(r.requests.queue) == 1)
        assert sum(worker.waiting() for worker in workers) == 1


@on_uvloop
async def test_when_nothing_runs_the_next_one_goes() -> None:
    async with rig(**LONG) as r:
        worker, client, _ = await three(r, free=0, leased=64)
        await client.say(prompt(4), 1)
        await worker.assigned()


@on_uvloop
async def test_a_small_one_passes_a_big_one() -> None:
    async with rig(**LONG) as r:
        worker, client, pool = await three(r, free=10)
        for request_id, slabs in enumerate((4, 8, 2), 1):
            await client.say(prompt(slabs), request_id)
        assert [len((await worker.assigned())[1].tokens) // 64 for _ in range(2)] == [4, 2]
        await pool.stats(free=30)
        assert len((await worker.assigned())[1].tokens) // 64 == 8


@on_uvloop
async def test_never_fits_counts_all_slabs_but_damaged_ones() -> None:
    async with rig(**LONG) as r:
        client, _ = await r.client(), await r.pool(free=10, committed=3, cached=5, quarantined=2, leased=0)
        await client.say(prompt(80), 1)
        await until(lambda: len(r.requests.queue))
        await r.worker(slabs=20)
        error = await client.hear_a(Error, 1)
        assert (error.code, error.limit) == (Code.NEVER_FITS, 18)
        assert (await client.refused(prompt(18), 2)).limit == 18


@on_uvloop
async def test_what_fits_no_more_is_refused_when_that_shows() -> None:
    async with rig(**LONG) as r:
        worker, client, pool = await three(r, free=64)
        for request_id in range(1, 6):
            await client.say(generate(max_tokens=1000), request_id)  # 63 slabs at most
        for _ in range(4):
            await worker.assigned()
        await pool.stats(free=0, quarantined=2)
        assert (await client.hear_a(Error, 5)).code == Code.NEVER_FITS


@on_uvloop
async def test_who_waits_too_long_for_slabs_is_told_so() -> None:
    async with rig(queue_seconds=1, **LONG) as r:
        worker, client, pool = await three(r, free=5)
        await client.say(prompt(4), 1)
        await worker.assigned()
        await client.say(prompt(4), 2)
        error = await client.hear_a(Error, 2)
        assert (error.code, error.retryable) == (Code.KV_EXHAUSTED, True)
        assert error.retry_after_ms > 0


# ---- what the pool is told -----------------------------------------------------------------------------------------


@on_uvloop
async def test_requests_that_a_worker_had_are_dropped_when_they_end() -> None:
    async with rig(max_seqs=1, **LONG) as r:
        worker, client, pool = await r.worker(max_seqs=1), await r.client(), await r.pool()
        for request_id in (1, 2):
            await client.say(prompt(1), request_id)
        key, _ = await worker.assigned()
        await client.say(Cancel(), 2)  # no worker ever had it
        await client.hear_a(Done, 2)
        worker.die()
        await until(lambda: len(r.requests.queue))
        await client.say(Cancel(), 1)
        await client.hear_a(Done, 1)
        await pool.told(pool_ipc.DROP, key)
        assert not pool.waiting()


@on_uvloop
async def test_token_check_tells_what_is_cached() -> None:
    async with rig() as r:
        worker, client, pool = await three(r)
        del worker
        await client.say(generate(5, 6, 7), 9)
        await until(lambda: r.requests.live)
        salt = next(iter(r.requests.live.values())).job.salt
        await client.say(TokenCheck(tokens=ids(5, 6, 7)), 4)
        tag, lookup, asked = await pool.hear()
        assert (tag, asked) == (pool_ipc.LOOKUP, {"tokens": ids(5, 6, 7), "salt": salt, "use": True, "pinned": 0,
                                                  "window": 0, "positions": "cache", "limit": 2})  # fmt: skip
        await pool.say(pool_ipc.LOOKED, lookup, 2)
        reply = await client.hear_a(TokenCheckReply, 4)
        assert (reply.prompt_tokens, reply.cached_tokens, reply.max_tokens, reply.slabs) == (3, 2, 61, 4)
        await client.say(TokenCheck(tokens=ids(5), cache=Cache(use=False)), 4)
        assert (await client.hear_a(TokenCheckReply, 4)).cached_tokens == 0
        assert not pool.waiting()


@pytest.mark.parametrize("dies", [False, True])
@on_uvloop
async def test_token_check_is_answered_without_the_pools_answer(dies: bool) -> None:
    async with rig() as r:
        client, pool = await r.client(), await r.pool()
        for request_id in (1, 2):
            await client.say(TokenCheck(tokens=ids(5, 6)), request_id)
        await client.say(Bye())
        lookups = [(await pool.hear())[1] for _ in range(2)]
        if dies:
            pool.die()
        answers = [await client.hear_a(TokenCheckReply, request_id) for request_id in (1, 2)]
        assert [answer.cached_tokens for answer in answers] == [0, 0]
        await client.closed()
        if not dies:
            await pool.say(pool_ipc.LOOKED, lookups[0], 1)  # nobody waits for it
            await pool.stats(free=7)
            await until(lambda: r.pool_link.available == 7)


@on_uvloop
async def test_only_so_many_questions_wait_for_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_link, "LOOKUPS_MOST", 2)
    monkeypatch.setattr(pool_link, "LOOKUP_SECONDS", 1000)
    async with rig() as r:
        client, pool = await r.client(), await r.pool()
        for request_id in (1, 2, 3):
            await client.say(TokenCheck(tokens=ids(5, 6)), request_id)
        await client.hear_a(TokenCheckReply, 3)
        for request_id in (1, 2):
            await pool.say(pool_ipc.LOOKED, (await pool.hear())[1], 1)
            assert (await client.hear_a(TokenCheckReply, request_id)).cached_tokens == 1


# ---- what the pool tells -------------------------------------------------------------------------------------------


@on_uvloop
async def test_its_numbers_are_in_stats() -> None:
    async with rig() as r:
        worker, client, pool = await three(r)
        states = {"free": 5, "leased": 4, "committed": 3, "cached": 2, "quarantined": 1}
        await pool.say(pool_ipc.STATS, {f'kv_slabs{{state="{state}"}}': n for state, n in states.items()} | {
            'kv_leases{worker="0"}': 4, 'kv_leases{worker="7"}': 0, 'kv_evictions_total{reason="lru"}': 6,
            "prefix_cache_queries_total": 100, "prefix_cache_hits_total": 64})  # fmt: skip
        await until(lambda: r.pool_link.available == 7)
        await worker.step()
        await until(lambda: next(iter(r.workers)).steps)
        stats = await client.stats()
        assert stats.kv_slabs == {"live": 7, "free": 5, "cached": 2, "quarantined": 1, "total": 15}
        assert stats.counters['kv_evictions_total{reason="lru"}'] == 6
        assert (stats.counters["prefix_cache_queries_total"], stats.counters["prefix_cache_hits_total"]) == (100, 64)
        assert (stats.workers[0]["kv_leases"], stats.workers[0]["kv_free_list"]) == (4, 60)


@on_uvloop
async def test_without_the_pool_the_last_numbers_count_and_a_new_one_replaces_it() -> None:
    async with rig(**LONG) as r:
        worker, client, pool = await three(r, free=10)
        pool.die()
        await client.say(prompt(4), 1)
        await worker.assigned()
        await client.say(prompt(8), 2)
        await until(lambda: len(r.requests.queue))
        assert (await client.stats()).kv_slabs["free"] == 10
        await r.pool(free=20)
        await worker.assigned()


@on_uvloop
async def test_nobody_is_short_when_the_pool_is_gone() -> None:
    async with rig(**LONG) as r:
        worker, client, pool = await three(r)
        await client.say(prompt(1), 1)
        await worker.assigned()
        await pool.say(pool_ipc.SHORT, [0, 1], 1)
        await until(lambda: r.pool_link.available == 0)
        await r.pool(free=0, leased=64)  # the old link is closed
        with pytest.raises(EOFError):
            await pool.hear()
        await worker.step()
        await client.stats()
        assert not worker.waiting()


@pytest.mark.parametrize("message", [5, [], [99], [pool_ipc.STATS], [pool_ipc.STATS, {}], [pool_ipc.SHORT, 0]])
@on_uvloop
async def test_a_pool_that_talks_nonsense_is_not_heard_any_more(message: object) -> None:
    async with rig() as r:
        _, client, pool = await three(r, free=12)
        await pool.raw(ipc.pack(message))
        with pytest.raises(EOFError):
            await pool.hear()
        assert (await client.stats()).kv_slabs["free"] == 12
        await r.pool(free=3)
        assert (await client.stats()).kv_slabs["free"] == 3
