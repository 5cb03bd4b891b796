"""How connections and the dispatcher end: half-close, BYE, drain, stop; and how its life shows until then."""

from __future__ import annotations

import asyncio
import socket

from colibri_daemon.common import ipc
from colibri_daemon.common.exit_codes import Exit
from colibri_daemon.common.pages import Field, State
from colibri_protocol.errors import Code
from colibri_protocol.messages import Bye, Done, Error, GoAway, Health, HealthReply, TokensOut
from dispatched import generate, ids, on_uvloop, rig, tokens_of, until


@on_uvloop
async def test_half_close_is_no_disconnect_if_hello_said_so() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client(half_close_ok=True)
        await client.say(generate(), 1)
        key, _ = await worker.assigned()
        client.sock.shutdown(socket.SHUT_WR)
        await worker.step([key, ids(9), None])
        await worker.step([key, ids(8), {"finish": "length"}])
        assert tokens_of(await client.rest(1)) == [9, 8]
        await client.closed()


@on_uvloop
async def test_half_close_is_a_disconnect_otherwise() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(), 1)
        key, _ = await worker.assigned()
        client.sock.shutdown(socket.SHUT_WR)
        await worker.told(ipc.CANCEL, key, "abort")
        await client.closed()


@on_uvloop
async def test_a_half_closed_client_that_then_goes_is_noticed() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client(half_close_ok=True)
        await client.say(generate(), 1)
        key, _ = await worker.assigned()
        client.sock.shutdown(socket.SHUT_WR)
        await until(lambda: len(r.sessions) == 1)
        client.sock.close()
        await worker.told(ipc.CANCEL, key, "abort")


@on_uvloop
async def test_bye_finishes_what_is_live() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(), 1)
        await client.say(Bye())
        key, _ = await worker.assigned()
        await worker.step([key, ids(9), {"finish": "length"}])
        assert tokens_of(await client.rest(1)) == [9]
        await client.closed()


@on_uvloop
async def test_drain_lets_live_requests_finish() -> None:
    async with rig() as r:
        assert await r.told() == "ready"
        worker, client = await r.worker(), await r.client()
        await client.say(generate(), 7)
        key, _ = await worker.assigned()
        r.tell({"t": "drain", "seconds": 30})
        away = await client.hear_a(GoAway)
        assert (away.reason, away.last_id) == ("drain", 7)
        assert 29_000 < away.deadline_ms <= 30_000
        await client.ask({"tokens": [1]}, 8)
        assert (await client.hear())[0].code == Code.DRAINING
        late = await r.client()
        await late.hear_a(GoAway)
        await late.say(Health())
        assert (await late.hear_a(HealthReply)).state == "draining"
        await worker.step([key, ids(9), {"finish": "length"}])
        assert tokens_of(await client.rest(7)) == [9]
        assert await r.told() == "drained"


@on_uvloop
async def test_drain_ends_the_rest_at_its_limit() -> None:
    async with rig() as r:
        await r.told()
        worker, client = await r.worker(max_seqs=1), await r.client()
        for request_id in (1, 2):
            await client.say(generate(), request_id)
        key, _ = await worker.assigned()
        await worker.step([key, ids(9), None])
        await client.hear_a(TokensOut, 1)
        r.tell({"t": "drain", "seconds": 0.05})
        await client.hear_a(GoAway)
        ends = {request_id: error for error, request_id in [await client.hear(), await client.hear()]}
        assert [ends[n].code for n in (1, 2)] == [Code.DRAINING] * 2
        assert [ends[n].tokens_sent for n in (1, 2)] == [1, 0]
        await worker.told(ipc.CANCEL, key, "abort")
        assert await r.told() == "drained"


@on_uvloop
async def test_stop_says_the_last_words() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(), 1)
        await worker.assigned()
        r.dispatcher.stop()
        assert await asyncio.wait_for(r.dispatcher.finished, 10) == Exit.STOPPED
        await client.hear_a(GoAway)
        assert (await client.hear_a(Error, 1)).code == Code.DRAINING


@on_uvloop
async def test_without_a_supervisor_it_ends_at_once() -> None:
    async with rig() as r:
        r.control.close()
        assert await asyncio.wait_for(r.dispatcher.finished, 10) == Exit.INTERNAL


@on_uvloop
async def test_life_shows_however_often_requests_begin_and_end() -> None:
    async with rig() as r:
        client, before, request_id = await r.client(), r.page[Field.PROGRESS], 0
        async with asyncio.timeout(10):
            while r.page[Field.PROGRESS] < before + 3:
                request_id += 1
                await client.say(generate(max_tokens=0), request_id)
                await client.hear_a(Done, request_id)


@on_uvloop
async def test_the_page_shows_life() -> None:
    async with rig() as r:
        assert r.page[Field.STATE] == State.READY
        worker, client = await r.worker(), await r.client()
        await client.say(generate(), 1)
        await worker.assigned()
        await until(lambda: r.page[Field.BUSY] == 1)
        before, beat = r.page[Field.PROGRESS], r.page[Field.BEAT_NS]
        await until(lambda: r.page[Field.PROGRESS] > before)
        assert r.page[Field.BEAT_NS] > beat > 0
