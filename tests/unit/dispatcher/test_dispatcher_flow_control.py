"""Credit, and clients that read slowly or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from colibri_daemon.common import ipc
from colibri_daemon.dispatcher.session import Timeouts
from colibri_protocol.errors import Code
from colibri_protocol.messages import Credit, Ping, TokensOut
from dispatched import Rig, Worker, generate, ids, on_uvloop, rig, tokens_of, until

UNREAD_MOST = 2_000_000  # bytes that wait for clients, whatever clients do
STEPS_MOST = 50_000


async def flood(r: Rig, worker: Worker, key: int, stop: Callable[[], bool]) -> int:
    """Steps of 1000 tokens, which nobody reads, until stop(); how many."""
    for steps in range(STEPS_MOST):
        if stop():
            return steps
        await worker.step(*[[key, ids(*[steps % 100] * 100), None]] * 10)
        assert r.unread < UNREAD_MOST
    raise AssertionError(f"{STEPS_MOST} steps and nothing has happened")


@on_uvloop
async def test_credit_bounds_what_is_sent() -> None:
    async with rig(timeouts=Timeouts(pause=0.05), max_tokens_total=1 << 16) as r:
        worker, client = await r.worker(), await r.client(features=("credit",))
        await client.say(generate(logprobs=0), 1)
        key, _ = await worker.assigned()
        many = [n % 100 for n in range(1030)]
        for at in range(0, 1030, 10):
            batch = ids(*many[at : at + 10])
            await worker.step([key, batch, {"lp": batch}])
        await worker.told(ipc.PAUSE, key)
        messages: list[TokensOut] = []
        while len(tokens_of(messages)) < 1024:
            messages.append(await client.hear_a(TokensOut, 1))
            assert len(messages) <= 103  # one for each step at most
        await client.say(Credit(tokens=4), 1)
        messages.append(await client.hear_a(TokensOut, 1))
        await client.say(Credit(tokens=100), 1)
        messages.append(await client.hear_a(TokensOut, 1))
        await worker.told(ipc.RESUME, key)
        await worker.step([key, ids(7), {"lp": ids(7), "finish": "length"}])
        messages += await client.rest(1)
        assert tokens_of(messages) == [*many, 7]
        assert b"".join(m.logprobs for m in messages[:-1]) == ids(*many, 7)
        assert [len(m.ids) // 4 for m in messages[-4:-1]] == [4, 2, 1]


@on_uvloop
async def test_the_end_waits_for_credit() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client(features=("credit",))
        await client.say(generate(), 1)
        key, _ = await worker.assigned()
        await worker.step([key, ids(*[1] * 1000), None])
        await worker.step([key, ids(*[1] * 100), {"finish": "length", "generated": 1100}])
        messages = [await client.hear_a(TokensOut, 1) for _ in range(2)]
        await until(lambda: not r.requests.running)
        await client.say(Credit(tokens=1000), 1)
        messages += await client.rest(1)
        assert tokens_of(messages) == [1] * 1100
        assert messages[-1].finish_reason == "length"


@on_uvloop
async def test_a_stream_that_waits_for_credit_has_a_deadline() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client(features=("credit",))
        await client.say(generate(deadline_ms=300), 1)
        key, _ = await worker.assigned()
        await worker.step([key, ids(*[1] * 1030), {"finish": "length", "generated": 1030}])
        *messages, done = await client.rest(1)
        assert len(tokens_of(messages)) == 1024
        assert (done.finish_reason, done.usage.generated) == ("deadline", 1030)


@on_uvloop
async def test_a_reader_that_lags_is_paused_and_then_goes_on() -> None:
    async with rig(timeouts=Timeouts(pause=0.05, soft=10_000)) as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(max_tokens=1 << 20), 1)
        key, _ = await worker.assigned()
        steps = await flood(r, worker, key, lambda: r.paused)
        await worker.told(ipc.PAUSE, key)
        await worker.step([key, ids(1), {"finish": "length"}])
        assert len(tokens_of(await client.rest(1))) == steps * 1000 + 1
        await until(lambda: not r.paused)


@on_uvloop
async def test_resumed_after_reading_on() -> None:
    async with rig(timeouts=Timeouts(pause=0.05, soft=10_000)) as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(), 1)
        key, _ = await worker.assigned()
        await flood(r, worker, key, lambda: r.paused)
        await worker.told(ipc.PAUSE, key)
        reading = asyncio.create_task(client.rest(1))
        await worker.told(ipc.RESUME, key)
        await worker.step([key, ids(1), {"finish": "length"}])
        assert (await reading)[-1].finish_reason == "length"


@pytest.mark.parametrize("timeouts", [Timeouts(hard=300_000), Timeouts(slow_reader=0.1)], ids=["bytes", "time"])
@on_uvloop
async def test_slow_readers_are_closed_and_their_memory_is_bounded(timeouts: Timeouts) -> None:
    async with rig(timeouts=timeouts) as r:
        worker, client, other = await r.worker(), await r.client(), await r.client()
        await client.say(generate(), 1)
        key, _ = await worker.assigned()
        await flood(r, worker, key, lambda: len(r.sessions) < 2 or r.closing)
        while (message := await client.hear())[1] == 1:
            assert isinstance(message[0], TokensOut)
        assert (message[0].code, message[0].retryable) == (Code.SLOW_READER, False)
        await client.closed()
        assert (await other.stats()).counters["slow_reader_disconnects_total"] == 1


@on_uvloop
async def test_questions_whose_answers_are_not_read() -> None:
    """Memory is bounded for answers that are no tokens, too."""
    async with rig(timeouts=Timeouts(linger=0.1)) as r:
        client = await r.client()
        ping, most = client.conn.send(Ping(data=bytes(64))) * 500, 0


        async def ask() -> None:
            nonlocal most
            for _ in range(STEPS_MOST):
                await client.raw(ping)
                most = max(most, r.unread)
                assert most < UNREAD_MOST

        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            await ask()
        assert most > 0
        assert not r.sessions
