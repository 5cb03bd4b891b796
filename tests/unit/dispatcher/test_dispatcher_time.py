"""Time-outs of connections, deadlines and longest waits of requests."""

from __future__ import annotations

import asyncio

import pytest
from colibri_daemon.common import ipc
from colibri_daemon.dispatcher.session import Timeouts
from colibri_protocol.errors import Code
from colibri_protocol.messages import Error, Ping, Pong
from dispatched import generate, ids, on_uvloop, rig


@on_uvloop
async def test_no_hello() -> None:
    async with rig(timeouts=Timeouts(hello=0.1)) as r:
        client = await r.dial()
        assert (await client.hear_a(Error)).code == Code.READ_TIMEOUT
        await client.closed()


@on_uvloop
async def test_half_a_frame_and_silence() -> None:
    async with rig(timeouts=Timeouts(frame=0.1)) as r:
        client = await r.client()
        whole = client.conn.send(Ping())
        await client.raw(whole + whole[:3])
        await client.hear_a(Pong)
        assert (await client.hear_a(Error)).code == Code.READ_TIMEOUT
        await client.closed()


@on_uvloop
async def test_a_frame_that_trickles_in_is_no_excuse() -> None:
    async with rig(timeouts=Timeouts(frame=0.2)) as r:
        client = await r.client()
        await client.raw((1000).to_bytes(4, "big"))

        async def trickle() -> None:
            while True:
                await client.raw(b"\x00")
                await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        assert (await client.hear_a(Error)).code == Code.READ_TIMEOUT
        trickling.cancel()


@on_uvloop
async def test_silent_connections_are_asked_and_then_dropped() -> None:
    async with rig(timeouts=Timeouts(ping=0.1, pings=2)) as r:
        client = await r.client()
        await client.hear_a(Ping)
        await client.say(Pong())
        for _ in range(2):
            await client.hear_a(Ping)
        await client.closed()


@on_uvloop
async def test_deadline_in_the_queue() -> None:
    async with rig() as r:
        client = await r.client()
        error = await client.refused(generate(deadline_ms=30))
        assert (error.code, error.retryable) == (Code.DEADLINE_EXCEEDED, False)
        assert not len(r.requests.queue)


@on_uvloop
async def test_a_deadline_after_the_end_does_nothing() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(deadline_ms=100), 1)
        key, _ = await worker.assigned()
        await worker.step([key, ids(9), {"finish": "length"}])
        await client.rest(1)
        await client.say(generate(deadline_ms=200), 2)  # so that we see the time pass
        key, _ = await worker.assigned()
        await worker.told(ipc.CANCEL, key, "deadline")


@pytest.mark.parametrize("output", [(), (9,)])
@on_uvloop
async def test_deadline_with_a_worker(output: tuple[int, ...]) -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(deadline_ms=100), 1)
        key, _ = await worker.assigned()
        await worker.told(ipc.CANCEL, key, "deadline")
        await worker.step([key, ids(*output), {"finish": "deadline"}])
        end = (await client.rest(1))[-1]
        if output:
            assert end.finish_reason == "deadline"
        else:
            assert end.code == Code.DEADLINE_EXCEEDED


@on_uvloop
async def test_deadline_while_no_worker_takes_over() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(deadline_ms=300), 1)
        key, _ = await worker.assigned()
        await worker.step([key, ids(9), None])
        worker.die()
        error = (await client.rest(1))[-1]
        assert (error.code, error.tokens_sent, error.retryable) == (Code.WORKER_LOST, 1, False)


@pytest.mark.parametrize(("loaded", "code"), [(True, Code.QUEUE_FULL), (False, Code.NOT_READY)])
@on_uvloop
async def test_waiting_too_long(loaded: bool, code: Code) -> None:
    async with rig(queue_seconds=0.1) as r:
        client = await r.client()
        if loaded:
            worker = await r.worker(max_seqs=1)
            await client.say(generate(), 9)
            await worker.assigned()
        error = await client.refused(generate(), 1)
        assert error.code == code
        assert error.retry_after_ms > 0
