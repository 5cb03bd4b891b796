"""The dispatcher and the KV pool: who gets a worker, who gives way, what is asked and told. A slab has 16 tokens."""

from __future__ import annotations

import asyncio

import pytest
from colibri_daemon.common import ipc, pool_ipc
from colibri_daemon.dispatcher import pool_link
from colibri_protocol.errors import Code
from colibri_protocol.messages import Bye, Cache, Cancel, Credit, Done, Error, TokenCheck, TokenCheckReply, TokensOut
from dispatched import Client, Pool, Rig, Worker, facts, generate, ids, on_uvloop, rig, tokens_of, until

LONG = {"facts": facts(max_len=1 << 16)}


def prompt(slabs: int, **fields: int) -> object:
    """A request whose prompt fills so many slabs; it needs one more for output."""
    return generate(*[1] * (16 * slabs), **{"max_tokens": 100, "ignore_eos": True} | fields)


async def three(r: Rig, **pool: int) -> tuple[Worker, Client, Pool]:
    return await r.worker(slabs=64), await r.client(), await r.pool(**pool)


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
        await until(lambda: r.dispatcher.pool.available == 5)
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
        await until(lambda: r.dispatcher.pool.available == 12)
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


# ---- preemption ----------------------------------------------------------------------------------------------------


@on_uvloop
async def test_the_youngest_gives_way_and_goes_on_token_for_token() -> None:
    async with rig(**LONG) as r:
        worker, client, pool = await three(r)
        for request_id in (1, 2):
            await client.say(prompt(1, seed=5), request_id)
        keys = [(await worker.assigned())[0] for _ in range(2)]
        await worker.step(*([key, ids(10), None] for key in keys))
        await pool.say(pool_ipc.SHORT, 0, 1)
        await worker.told(ipc.PREEMPT, keys[1])
        await worker.step([keys[0], ids(11), None], [keys[1], ids(11), {"finish": "preempted", "generated": 2}])
        await until(lambda: len(r.requests.queue))
        await pool.say(pool_ipc.RELIEVED, 0)
        await pool.stats(free=3)  # enough for a new one; one that was preempted leaves the other one room to grow
        await until(lambda: r.dispatcher.pool.available == 3)
        assert not worker.waiting()
        await pool.stats(free=4)
        key, job = await worker.assigned()
        assert (key, job.generated, job.seed) == (keys[1], ids(10, 11), 5)
        await worker.step([key, ids(12), {"finish": "length", "generated": 3}])
        heard = [await client.hear() for _ in range(6)]
        mine = [message for message, request_id in heard if request_id == 2]
        assert tokens_of(mine) == [10, 11, 12]
        assert [message.index for message in mine[:-1]] == [0, 1, 2]
        assert (await client.stats()).counters["num_preemptions_total"] == 1


@on_uvloop
async def test_whoever_is_alone_goes_on() -> None:
    async with rig(**LONG) as r:
        worker, client, pool = await three(r)
        await client.say(prompt(1), 1)
        key, _ = await worker.assigned()
        await pool.say(pool_ipc.SHORT, 0, 8)
        await until(lambda: r.dispatcher.pool.available == 0)
        await worker.step([key, ids(10), None])
        await client.hear_a(TokensOut, 1)
        assert not worker.waiting()
        await worker.step([key, ids(11), {"finish": "length", "generated": 2}])
        assert (await client.rest(1))[-1].finish_reason == "length"


@on_uvloop
async def test_one_at_a_time_until_nobody_is_short() -> None:
    async with rig(**LONG) as r:
        worker, client, pool = await three(r)
        for request_id in (1, 2, 3):
            await client.say(prompt(1), request_id)
        keys = [(await worker.assigned())[0] for _ in range(3)]
        await pool.say(pool_ipc.SHORT, 0, 3)
        await worker.told(ipc.PREEMPT, keys[2])
        await pool.say(pool_ipc.SHORT, 0, 4)
        await worker.step([keys[0], ids(1), None])
        await client.hear_a(TokensOut, 1)
        assert not worker.waiting()
        await worker.step([keys[2], b"", {"finish": "preempted", "generated": 0}])
        await worker.told(ipc.PREEMPT, keys[1])  # as it still is
        await worker.step([keys[1], b"", {"finish": "preempted", "generated": 0}])
        await until(lambda: len(r.requests.queue) == 2)
        assert [stream.key for stream in r.requests.queue] == keys[1:]


@on_uvloop
async def test_a_victim_that_ends_by_itself_is_not_preempted() -> None:
    async with rig(**LONG) as r:
        worker, client, pool = await three(r)
        for request_id in (1, 2):
            await client.say(prompt(1), request_id)
        keys = [(await worker.assigned())[0] for _ in range(2)]
        await pool.say(pool_ipc.SHORT, 0, 1)
        await worker.told(ipc.PREEMPT, keys[1])
        await worker.step([keys[1], ids(9), {"finish": "length", "generated": 1}])
        assert (await client.rest(2))[-1].finish_reason == "length"
        assert (await client.stats()).counters["num_preemptions_total"] == 0


@pytest.mark.parametrize("ending", ["cancel", "worker"])
@on_uvloop
async def test_a_victim_that_leaves_in_another_way(ending: str) -> None:
    async with rig(**LONG) as r:
        worker, client, pool = await three(r)
        for request_id in (1, 2):
            await client.say(prompt(1), request_id)
        keys = [(await worker.assigned())[0] for _ in range(2)]
        await pool.say(pool_ipc.SHORT, 0, 1)
        await worker.told(ipc.PREEMPT, keys[1])
        if ending == "cancel":
            await client.say(Cancel(), 2)
            await worker.told(ipc.CANCEL, keys[1], "abort")
            await worker.step([keys[1], b"", {"finish": "preempted", "generated": 0}])
            assert (await client.hear_a(Done, 2)).finish_reason == "abort"
        else:
            worker.die()
            other = await r.worker(slot=1)
            await pool.say(pool_ipc.RELIEVED, 0)
            await pool.stats(free=60)
            assert [(await other.assigned())[0] for _ in keys] == keys
            await pool.say(pool_ipc.SHORT, 1, 1)
            await other.told(ipc.PREEMPT, keys[1])


@on_uvloop
async def test_alone_and_without_a_step_it_ends() -> None:
    async with rig(**LONG) as r:
        worker, client, pool = await three(r)
        await client.say(prompt(1), 1)
        key, _ = await worker.assigned()
        await worker.step([key, ids(9), None])
        await pool.say(pool_ipc.SHORT, 0, 1)
        await worker.told(ipc.CANCEL, key, "abort")
        await worker.step([key, b"", {"finish": "abort", "generated": 1}])
        error = (await client.rest(1))[-1]
        assert (error.code, error.tokens_sent, error.retryable) == (Code.KV_EXHAUSTED, 1, True)
        assert error.retry_after_ms > 0


@on_uvloop
async def test_the_deadline_of_a_preempted_request() -> None:
    async with rig(**LONG) as r:
        worker, client, pool = await three(r)
        await client.say(prompt(1), 1)
        await client.say(prompt(1, deadline_ms=300), 2)
        keys = [(await worker.assigned())[0] for _ in range(2)]
        await pool.say(pool_ipc.SHORT, 0, 1)
        await worker.told(ipc.PREEMPT, keys[1])
        await worker.step([keys[1], b"", {"finish": "preempted", "generated": 0}])
        assert (await client.hear_a(Error, 2)).code == Code.DEADLINE_EXCEEDED


@on_uvloop
async def test_tokens_kept_back_are_sent_while_it_waits() -> None:
    async with rig(**LONG) as r:
        worker, pool, other = await r.worker(slabs=99), await r.pool(free=99), await r.client()
        client = await r.client(features=("credit",))
        await other.say(prompt(1), 1)
        await worker.assigned()
        await client.say(generate(max_tokens=1050 + 5), 1)
        key, _ = await worker.assigned()
        await worker.step([key, ids(*range(50)) * 21, None])  # 26 over
        assert len((await client.hear_a(TokensOut, 1)).ids) == 4 * 1024
        await pool.say(pool_ipc.SHORT, 0, 1)
        await worker.told(ipc.PREEMPT, key)
        await worker.step([key, b"", {"finish": "preempted", "generated": 1050}])
        await until(lambda: len(r.requests.queue))
        await client.say(Credit(tokens=26), 1)
        tokens = await client.hear_a(TokensOut, 1)
        assert (tokens.index, len(tokens.ids)) == (1024, 4 * 26)


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
            await until(lambda: r.dispatcher.pool.available == 7)


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
        await until(lambda: r.dispatcher.pool.available == 7)
        await worker.step()
        await until(lambda: next(iter(r.dispatcher.workers)).steps)
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
        await pool.say(pool_ipc.SHORT, 0, 1)
        await until(lambda: r.dispatcher.pool.available == 0)
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


@on_uvloop
async def test_cached_is_of_the_prompt_and_the_first_attempts() -> None:
    async with rig() as r:
        worker, client, pool = await three(r)
        await client.say(generate(), 1)
        await client.say(generate(), 2)
        keys = [(await worker.assigned())[0] for _ in range(2)]
        await worker.step([keys[1], ids(9), {"cached": 1}])
        assert (await client.hear_a(TokensOut, 2)).cached_tokens == 1
        await pool.say(pool_ipc.SHORT, 0, 1)
        await worker.told(ipc.PREEMPT, keys[1])
        await worker.step([keys[1], b"", {"finish": "preempted", "generated": 1}])
        await pool.say(pool_ipc.RELIEVED, 0)
        await pool.stats(free=50)
        await worker.assigned()
        await worker.step([keys[1], ids(8), {"cached": 3, "finish": "length", "generated": 2}])
        assert (await client.rest(2))[-1].usage.cached == 1


@on_uvloop
async def test_many_under_pressure_all_get_their_tokens() -> None:
    """A worker that computes, and a pool that takes each slab back when its request leaves."""
    async with rig(**LONG) as r:
        worker, client, pool = await r.worker(max_seqs=8), await r.client(), await r.pool(free=8)
        for request_id in range(1, 9):
            await client.say(generate(request_id, max_tokens=40, ignore_eos=True), request_id)
        jobs: dict[int, list[int]] = {}
        preempted: set[int] = set()

        def held() -> int:
            return sum(-(-(count + 1) // 16) for _, count in jobs.values())

        async def turn() -> None:
            while worker.waiting():
                tag, key, *rest = await worker.hear()
                if tag == ipc.ASSIGN:
                    jobs[key] = [rest[0]["tokens"][0], len(rest[0].get("generated", b"")) // 4]
                elif tag == ipc.PREEMPT:
                    preempted.add(key)
            rows = []
            for key, job in list(jobs.items()):
                if key in preempted:
                    preempted.remove(key)
                    rows.append([jobs.pop(key) and key, b"", {"finish": "preempted"}])
                elif (job[1] + 1) % 16 or held() < 8:
                    job[1] += 1
                    ends = job[1] == 40
                    rows.append([key, ids(job[0] + job[1]), {"finish": "length", "generated": 40} if ends else None])
                    if ends:
                        del jobs[key]
                else:
                    await pool.say(pool_ipc.SHORT, 0, 1)
            await worker.step(*rows)
            if held() < 8:
                await pool.say(pool_ipc.RELIEVED, 0)
            await pool.stats(free=8 - held())

        async def serve() -> None:
            while True:
                await turn()
                await asyncio.sleep(0.001)

        serving = asyncio.create_task(serve())
        output: dict[int, list[int]] = {request_id: [] for request_id in range(1, 9)}
        ended = 0
        while ended < 8:
            message, request_id = await client.hear()
            output[request_id] += tokens_of([message])
            ended += isinstance(message, Done)
        serving.cancel()
        assert output == {request_id: [request_id + n for n in range(1, 41)] for request_id in output}
        assert (await client.stats()).counters["num_preemptions_total"] > 0
