"""Fair places and limits per owner, in the dispatcher: who comes while somebody else has every place starts at once."""

from __future__ import annotations

import asyncio
import os

from colibri_daemon.common import ipc
from colibri_protocol.errors import Code
from colibri_protocol.messages import Done, TokensOut
from dispatched import LONG, Worker, generate, ids, on_uvloop, prompt, rig, three, until

MINE = {"trusted_uids": (os.getuid(),)}


async def assigned(worker: Worker, count: int) -> list[int]:
    return [(await worker.assigned())[0] for _ in range(count)]


@on_uvloop
async def test_an_owner_who_comes_takes_a_place_at_once() -> None:
    """In one go: the youngest of the other's is told to leave, and the newcomer is there before it has answered."""
    async with rig(**MINE) as r:
        worker, client = await r.worker(), await r.client()
        for request_id in range(1, 7):
            await client.say(generate(tenant="a"), request_id)
        keys = await assigned(worker, 4)
        await client.say(generate(tenant="b", priority=-100), 10)
        await worker.told(ipc.PREEMPT, keys[3])
        assert await assigned(worker, 1) == [7]
        await worker.step([keys[3], ids(4), {"finish": "preempted", "generated": 1}], [7, ids(5), None])
        assert {(await client.hear())[1] for _ in range(2)} == {4, 10}
        await client.say(generate(tenant="b"), 11)
        await worker.told(ipc.PREEMPT, keys[2])
        assert await assigned(worker, 1) == [8]
        await client.say(generate(tenant="b"), 12)
        await worker.step([7, ids(2), {"finish": "stop", "generated": 2}])
        assert await assigned(worker, 1) == [9]  # two and two are fair: b got its own place, nobody was asked to leave
        await worker.step([8, ids(2), {"finish": "stop", "generated": 1}], [keys[2], ids(4), {"finish": "preempted"}])
        assert await assigned(worker, 1) == [keys[2]]  # it waits for nothing but a place, and keeps its turn
        assert (await (await r.client()).stats()).counters["num_preemptions_total"] == 2


@on_uvloop
async def test_nobody_is_asked_for_the_last_place_of_a_pair() -> None:
    async with rig(**MINE) as r:
        worker, client = await r.worker(max_seqs=1), await r.client()
        await client.say(generate(tenant="a"), 1)
        await assigned(worker, 1)
        await client.say(generate(tenant="b"), 2)
        await until(lambda: len(r.requests.queue))
        await asyncio.sleep(0.25)  # two ticks
        assert not worker.waiting()


@on_uvloop
async def test_slabs_are_asked_back_too_one_request_at_a_time() -> None:
    async with rig(**LONG, **MINE) as r:
        worker, client, pool = await three(r, free=4)
        for request_id in (1, 2, 3):
            await client.say(prompt(1, tenant="a"), request_id)
        keys = await assigned(worker, 2)  # each has two of the four slabs
        await worker.step(*([key, ids(9), None] for key in keys))
        await pool.stats(free=2)
        keys += await assigned(worker, 1)
        await worker.step([keys[2], ids(9), None])
        await pool.stats(free=0)
        await client.say(prompt(2, tenant="b"), 10)
        await worker.told(ipc.PREEMPT, keys[2])
        await worker.step([keys[2], ids(8), {"finish": "preempted"}])
        await pool.stats(free=2)  # not enough
        await worker.told(ipc.PREEMPT, keys[1])
        await worker.step([keys[1], ids(8), {"finish": "preempted"}])
        await pool.stats(free=4)
        assert await assigned(worker, 1) == [4]
        assert not worker.waiting()


@on_uvloop
async def test_live_requests_of_an_owner_over_all_connections() -> None:
    async with rig(**MINE, requests_per_uid=2) as r:
        clients = [await r.client(), await r.client()]
        worker = await r.worker()
        for client in clients:
            await client.say(generate(tenant="a"), 1)
        (first, _) = await assigned(worker, 2)
        error = await clients[0].refused(generate(tenant="a"), 2)
        assert (error.code, error.limit) == (Code.TOO_MANY_INFLIGHT, 2)
        assert "tenant 'a'" in error.message
        await clients[0].say(generate(tenant="b"), 3)
        await assigned(worker, 1)
        await worker.step([first, ids(2), {"finish": "stop", "generated": 1}])
        answers = [(await clients[0].hear())[0] for _ in range(2)]
        assert [type(answer) for answer in answers] == [TokensOut, Done]
        await clients[1].say(generate(tenant="a"), 4)
        await assigned(worker, 1)
        assert (await clients[0].refused(generate(tenant="a"), 5)).code == Code.TOO_MANY_INFLIGHT


@on_uvloop
async def test_what_is_being_generated_counts_for_whose_turn_it_is() -> None:
    """Not only when it is done."""
    async with rig(**MINE) as r:
        worker, client = await r.worker(max_seqs=2), await r.client()
        await client.say(generate(tenant="a", max_tokens=50), 1)
        await client.say(generate(tenant="b", max_tokens=50), 2)
        first, second = await assigned(worker, 2)
        await worker.step([first, ids(9) * 40, None])
        share = r.requests.queue.share
        me = os.getuid()
        await until(lambda: share.clock((me, "a")) >= share.clock((me, "b")) + 30)
        for request_id, tenant in ((3, "a"), (4, "b")):
            await client.say(generate(tenant=tenant), request_id)
        await until(lambda: len(r.requests.queue) == 2)
        await worker.step([second, ids(2), {"finish": "stop", "generated": 1}])
        assert await assigned(worker, 1) == [4]


@on_uvloop
async def test_the_stall_bound_is_told() -> None:
    async with rig() as r:
        client = await r.client()
        assert (await client.stats()).counters["stall_bound_seconds"] == 0
        await r.worker(stall_ms=100)
        await r.worker(slot=1, stall_ms=250)
        assert (await client.stats()).counters["stall_bound_seconds"] == 0.25
