"""Who gives way when a worker is short of slabs, and how a request goes on after that. A slab has 16 tokens."""

from __future__ import annotations

import asyncio

import pytest
from colibri_daemon.common import ipc, pool_ipc
from colibri_protocol.errors import Code
from colibri_protocol.messages import Cancel, Credit, Done, Error, TokensOut
from dispatched import LONG, generate, ids, on_uvloop, prompt, rig, three, tokens_of, until


@on_uvloop
async def test_the_youngest_gives_way_and_goes_on_token_for_token() -> None:
    async with rig(**LONG) as r:
        worker, client, pool = await three(r)
        for request_id in (1, 2):
            await client.say(prompt(1, seed=5), request_id)
        keys = [(await worker.assigned())[0] for _ in range(2)]
        await worker.step(*([key, ids(10), None] for key in keys))
        await pool.say(pool_ipc.SHORT, [0, 1], 1)
        await worker.told(ipc.PREEMPT, keys[1])
        await worker.step([keys[0], ids(11), None], [keys[1], ids(11), {"finish": "preempted", "generated": 2}])
        await until(lambda: len(r.requests.queue))
        await pool.say(pool_ipc.RELIEVED, [0, 1])
        await pool.stats(free=3)  # enough for a new one; one that was preempted leaves the other one room to grow
        await until(lambda: r.pool_link.available == 3)
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
        await pool.say(pool_ipc.SHORT, [0, 1], 8)
        await until(lambda: r.pool_link.available == 0)
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
        await pool.say(pool_ipc.SHORT, [0, 1], 3)
        await worker.told(ipc.PREEMPT, keys[2])
        await pool.say(pool_ipc.SHORT, [0, 1], 4)
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
        await pool.say(pool_ipc.SHORT, [0, 1], 1)
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
        await pool.say(pool_ipc.SHORT, [0, 1], 1)
        await worker.told(ipc.PREEMPT, keys[1])
        if ending == "cancel":
            await client.say(Cancel(), 2)
            await worker.told(ipc.CANCEL, keys[1], "abort")
            await worker.step([keys[1], b"", {"finish": "preempted", "generated": 0}])
            assert (await client.hear_a(Done, 2)).finish_reason == "abort"
        else:
            worker.die()
            other = await r.worker(slot=1)
            await pool.say(pool_ipc.RELIEVED, [0, 1])
            await pool.stats(free=60)
            assert [(await other.assigned())[0] for _ in keys] == keys
            await pool.say(pool_ipc.SHORT, [1, 2], 1)
            await other.told(ipc.PREEMPT, keys[1])


@on_uvloop
async def test_alone_and_without_a_step_it_ends() -> None:
    async with rig(**LONG) as r:
        worker, client, pool = await three(r)
        await client.say(prompt(1), 1)
        key, _ = await worker.assigned()
        await worker.step([key, ids(9), None])
        await pool.say(pool_ipc.SHORT, [0, 1], 1)
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
        await pool.say(pool_ipc.SHORT, [0, 1], 1)
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
        await pool.say(pool_ipc.SHORT, [0, 1], 1)
        await worker.told(ipc.PREEMPT, key)
        await worker.step([key, b"", {"finish": "preempted", "generated": 1050}])
        await until(lambda: len(r.requests.queue))
        await client.say(Credit(tokens=26), 1)
        tokens = await client.hear_a(TokensOut, 1)
        assert (tokens.index, len(tokens.ids)) == (1024, 4 * 26)


@on_uvloop
async def test_cached_is_of_the_prompt_and_the_first_attempts() -> None:
    async with rig() as r:
        worker, client, pool = await three(r)
        await client.say(generate(), 1)
        await client.say(generate(), 2)
        keys = [(await worker.assigned())[0] for _ in range(2)]
        await worker.step([keys[1], ids(9), {"cached": 1}])
        assert (await client.hear_a(TokensOut, 2)).cached_tokens == 1
        await pool.say(pool_ipc.SHORT, [0, 1], 1)
        await worker.told(ipc.PREEMPT, keys[1])
        await worker.step([keys[1], b"", {"finish": "preempted", "generated": 1}])
        await pool.say(pool_ipc.RELIEVED, [0, 1])
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
                    await pool.say(pool_ipc.SHORT, [0, 1], 1)
            await worker.step(*rows)
            if held() < 8:
                await pool.say(pool_ipc.RELIEVED, [0, 1])
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
            assert len(output[request_id]) <= 40
            ended += isinstance(message, Done)
        serving.cancel()
        assert output == {request_id: [request_id + n for n in range(1, 41)] for request_id in output}
        assert (await client.stats()).counters["num_preemptions_total"] > 0
