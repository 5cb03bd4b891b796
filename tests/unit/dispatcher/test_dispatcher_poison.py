"""Requests that end their workers: suspects run alone, the guilty one is refused, the others lose nothing."""

from __future__ import annotations

import asyncio
import os

import pytest
from colibri_daemon.common import ipc
from colibri_daemon.dispatcher.poison import PROBATION_TOKENS
from colibri_protocol.errors import Code
from colibri_protocol.messages import Cancel, Done, Error, TokensOut
from dispatched import Client, Rig, Worker, generate, ids, on_uvloop, rig, score, tokens_of, until

ENOUGH = ids(*range(PROBATION_TOKENS))


async def running(r: Rig, worker: Worker, client: Client, count: int) -> list[int]:
    """Keys of so many requests, ids 1 …, in a worker."""
    for request_id in range(1, count + 1):
        await client.say(generate(max_tokens=50), request_id)
    return [(await worker.assigned())[0] for _ in range(count)]


async def quiet(worker: Worker) -> bool:
    """Nothing is said to it for a while."""
    await asyncio.sleep(0.05)
    return not worker.waiting()


@pytest.mark.parametrize("cause", ["fault", "exit", "hang"])
@on_uvloop
async def test_the_second_death_alone_is_the_end(cause: str) -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        (key,) = await running(r, worker, client, 1)
        await worker.step([key, ids(9), None])
        await client.hear_a(TokensOut, 1)
        worker.die(cause, (key,))
        second = await r.worker()
        assert (await second.assigned())[1].generated == ids(9)
        second.die(cause, (key,))
        error = await client.hear_a(Error, 1)
        assert (error.code, error.tokens_sent, error.retryable) == (Code.POISONED, 1, False)
        counters = (await client.stats()).counters
        assert counters["poison_requests_total"] == counters['request_errors_total{code="POISONED"}'] == 1


@on_uvloop
async def test_whoever_was_not_in_the_step_goes_on_beside_others() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        keys = await running(r, worker, client, 3)
        worker.die("fault", (keys[1],))
        second, third = await r.worker(slot=1), await r.worker(slot=2)
        assert (await second.assigned())[0] == keys[1]
        assert [(await third.assigned())[0] for _ in range(2)] == [keys[0], keys[2]]
        await client.say(generate(), 4)
        assert (await third.assigned())[0] == keys[2] + 1
        second.die("fault", (keys[1],))
        assert (await client.hear_a(Error, 2)).code == Code.POISONED


@on_uvloop
async def test_suspects_take_turns_alone_until_all_are_cleared() -> None:
    """In the only worker there is: each goes on for a while and gives its place to the next."""
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        keys = await running(r, worker, client, 3)
        worker.die("fault", tuple(keys))
        await client.say(generate(), 4)  # waits for them
        second = await r.worker()
        for key in keys:
            assert (await second.assigned())[0] == key
            await second.step([key, ENOUGH[:-4], None])
            assert await quiet(second)
            await second.step([key, ENOUGH[-4:], None])
            if key != keys[-1]:
                await second.told(ipc.PREEMPT, key)
        assert {(await second.assigned())[0]} == {keys[2] + 1}  # the last one stays, others join it
        await second.step(*([key, b"", {"finish": "preempted"}] for key in keys[:2]))
        assert {(await second.assigned())[0] for _ in range(2)} == set(keys[:2])


@on_uvloop
async def test_a_suspect_waits_for_the_emptiest_worker_to_be_empty() -> None:
    async with rig() as r:
        first, busy, client = await r.worker(), await r.worker(slot=1), await r.client()
        for request_id in (1, 2):
            await client.say(generate(), request_id)
        mine, neighbour = (await first.assigned())[0], (await busy.assigned())[0]
        first.die("fault", (mine,))
        await client.say(generate(), 3)
        assert await quiet(busy)  # it is kept for the suspect, and not empty yet
        await busy.step([neighbour, ids(2), {"finish": "stop", "generated": 1}])
        assert (await busy.assigned())[0] == mine
        assert await quiet(busy)
        other = await r.worker()
        assert (await other.assigned())[0] == neighbour + 1


@on_uvloop
async def test_a_suspect_that_ends_well_leaves_its_worker_to_others() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        (key,) = await running(r, worker, client, 1)
        worker.die("fault", (key,))
        second = await r.worker()
        await second.assigned()
        await client.say(generate(), 2)
        assert await quiet(second)
        await second.step([key, ids(2), {"finish": "stop", "generated": 1}])
        assert isinstance((await client.rest(1))[-1], Done)
        assert (await second.assigned())[0] == key + 1


@on_uvloop
async def test_kills_from_outside_count_after_five_without_a_token() -> None:
    async with rig() as r:
        client = await r.client()
        await client.say(generate(), 1)
        for death in range(8):
            worker = await r.worker(slot=death)
            key, _ = await worker.assigned()
            if death == 1:  # progress: counting begins anew
                await worker.step([key, ids(9), None])
                await client.hear_a(TokensOut, 1)
            worker.die("killed", (key,))
        error = await client.hear_a(Error, 1)
        assert (error.code, error.tokens_sent) == (Code.POISONED, 1)


@on_uvloop
async def test_workers_that_are_stopped_never_count() -> None:
    async with rig() as r:
        client = await r.client()
        await client.say(generate(), 1)
        for _ in range(12):
            worker = await r.worker()
            key, _ = await worker.assigned()
            worker.die("stopped", (key,))
        last = await r.worker()
        await last.assigned()
        await last.step([key, ids(2), {"finish": "stop", "generated": 1}])
        assert tokens_of(await client.rest(1)) == [2]


async def poison(r: Rig, client: Client, request_id: int, **fields: object) -> None:
    await client.say(generate(**fields), request_id)
    for _ in range(2):
        worker = await r.worker()
        key, _ = await worker.assigned()
        worker.die("fault", (key,))
    assert (await client.hear_a(Error, request_id)).code == Code.POISONED


@on_uvloop
async def test_it_is_refused_from_then_on_to_its_owner_alone() -> None:
    async with rig(trusted_uids=(os.getuid(),)) as r:
        client, other = await r.client(), await r.client()
        await poison(r, client, 1, temperature=0.7, tenant="a")
        error = await other.refused(generate(temperature=0.7, tenant="a"))
        assert (error.code, error.retryable) == (Code.POISONED, False)
        assert "s more" in error.message
        assert (await client.stats()).counters['admission_rejections_total{reason="poisoned"}'] == 1
        others = {"tenant": "b"}, {"tenant": "a", "seed": 3}, {"tenant": "a", "max_tokens": 9}
        for number, fields in enumerate(others):
            await client.say(generate(**{"temperature": 0.7} | fields), 10 + number)
        worker = await r.worker()
        assert len([await worker.assigned() for _ in range(3)]) == 3


@on_uvloop
async def test_scores_may_be_poison_too() -> None:
    async with rig() as r:
        client = await r.client()
        await client.say(score(), 1)
        for _ in range(2):
            worker = await r.worker()
            key, _ = await worker.assigned()
            worker.die("fault", (key,))
        assert (await client.hear_a(Error, 1)).code == Code.POISONED
        assert (await client.refused(score())).code == Code.POISONED


@on_uvloop
async def test_a_suspect_can_be_cancelled_while_it_waits() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        (key,) = await running(r, worker, client, 1)
        worker.die("fault", (key,))
        await until(lambda: r.requests.queue.apart)
        await client.say(Cancel(), 1)
        assert (await client.hear_a(Done, 1)).finish_reason == "abort"
        assert (len(r.requests.queue), r.requests.queue.tokens) == (0, 0)


@pytest.mark.parametrize(("cause", "code"), [("hang", Code.WORKER_HUNG), ("killed", Code.WORKER_LOST)])
@on_uvloop
async def test_nobody_takes_over_within_the_deadline(cause: str, code: Code) -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(deadline_ms=300), 1)
        key, _ = await worker.assigned()
        worker.die(cause, (key,))
        error = await client.hear_a(Error, 1)
        assert (error.code, error.tokens_sent, error.retryable) == (code, 0, True)


@pytest.mark.parametrize("ending", ["deadline", "abort"])
@on_uvloop
async def test_a_worker_that_does_not_answer_holds_nobody_up(ending: str) -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(deadline_ms=300 if ending == "deadline" else 60_000), 1)
        key, _ = await worker.assigned()
        await worker.step([key, ids(9), None])
        await client.hear_a(TokensOut, 1)
        if ending == "abort":
            await client.say(Cancel(), 1)
        await worker.told(ipc.CANCEL, key, ending)
        message, _ = await client.hear()
        if ending == "deadline":
            assert (message.code, message.tokens_sent, message.retryable) == (Code.WORKER_HUNG, 1, False)
        else:
            assert message.finish_reason == "abort"
        await worker.step([key, ids(8), {"finish": "abort"}])  # too late: nobody has that key
        await client.say(generate(), 2)
        assert (await worker.assigned())[0] == key + 1
