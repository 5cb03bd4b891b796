"""Connections: handshake, small talk and limits."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from colibri_daemon.dispatcher.handlers import HANDLERS
from colibri_protocol.errors import Code
from colibri_protocol.message import MESSAGES, SERVER
from colibri_protocol.messages import (
    Error,
    Health,
    HealthReply,
    Hello,
    Ping,
    Pong,
    TokenCheck,
    TokenCheckReply,
    Welcome,
)
from dispatched import EOS, FACTS, MAX_LEN, Client, generate, ids, no_descriptors, on_uvloop, rig, tokens_of, until


def test_every_message_of_a_client_has_a_handler() -> None:
    assert set(HANDLERS) == {message for message in MESSAGES.values() if message.SENDER != SERVER}


# ---- handshake and small talk --------------------------------------------------------------------------------------


@on_uvloop
async def test_welcome_tells_model_and_limits() -> None:
    async with rig(requests_per_connection=7, max_frame=8192) as r:
        client = await r.dial()
        await client.say(Hello(proto_min=0, proto_max=9, features=("credit", "sorcery")))
        welcome = await client.hear_a(Welcome)
        assert (welcome.proto, welcome.features) == (1, ("credit",))
        assert (welcome.model.name, welcome.model.max_len, welcome.model.eos_ids) == (FACTS.name, MAX_LEN, (EOS,))
        assert (welcome.limits.requests, welcome.limits.frame) == (7, 8192)


@on_uvloop
async def test_trusted_users_may_have_more_requests() -> None:
    async with rig(trusted_uids=(os.getuid(),)) as r:
        client = await r.dial()
        await client.say(Hello(proto_min=1, proto_max=1))
        assert (await client.hear_a(Welcome)).limits.requests == 1024


@on_uvloop
async def test_no_common_version() -> None:
    async with rig() as r:
        client = await r.dial()
        await client.say(Hello(proto_min=2, proto_max=3))
        assert (await client.hear_a(Error)).code == Code.VERSION
        await client.closed()


@on_uvloop
async def test_ping_and_token_check() -> None:
    async with rig() as r:
        client = await r.client()
        await client.say(Ping(data=b"x"), 4)
        pong = await client.hear_a(Pong, 4)
        assert pong.data == b"x"
        assert pong.ns > 0
        await client.say(TokenCheck(tokens=ids(1, 2), max_tokens=1000), 5)
        assert await client.hear_a(TokenCheckReply, 5) == TokenCheckReply(prompt_tokens=2, max_tokens=62, slabs=0)
        await r.worker()
        await client.say(TokenCheck(tokens=ids(1, 2), max_tokens=1000), 5)
        assert (await client.hear_a(TokenCheckReply, 5)).slabs == 4
        error = await client.refused(TokenCheck(tokens=ids(1, 100)), 6)
        assert (error.code, error.index) == (Code.TOKEN_OUT_OF_RANGE, 1)


@on_uvloop
async def test_health_is_what_the_supervisor_said() -> None:
    async with rig() as r:
        client = await r.client()
        await client.say(Health())
        assert (await client.hear_a(HealthReply)).state == "starting"
        workers = [{"slot": 0, "up": True, "pid": 7, "restarts": 2}]
        r.tell({"t": "state", "live": True, "ready": True, "state": "ready", "reason": "", "workers": workers})

        async def ready() -> HealthReply:
            while True:
                await client.say(Health())
                if (reply := await client.hear_a(HealthReply)).ready:
                    return reply

        reply = await asyncio.wait_for(ready(), 10)
        assert (reply.state, reply.workers[0].pid, reply.workers[0].restarts) == ("ready", 7, 2)


@on_uvloop
async def test_a_model_that_cannot_be_loaded_refuses_requests() -> None:
    async with rig() as r:
        client = await r.client()
        r.tell({"t": "state", "live": True, "ready": False, "state": "failed", "reason": "no such folder"})
        await until(r.dispatcher.health.failed)
        error = await client.refused(generate())
        assert (error.code, error.retryable) == (Code.NOT_READY, True)
        assert "no such folder" in error.message
        assert error.retry_after_ms > 0


@on_uvloop
async def test_stats_add_up() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.refused(generate(100), 1)
        await client.say(generate(), 1)
        key, _ = await worker.assigned()
        await worker.step([key, ids(1, 2), {"cached": 2, "finish": "stop", "match": ["eos", 2]}])
        await client.rest(1)
        await client.say(generate(), 2)
        await worker.assigned()
        stats = await client.stats()
        counters = stats.counters
        finished = sum(n for name, n in counters.items() if name.startswith("request_success_total"))
        assert counters["requests_started_total"] == finished + stats.running + stats.waiting == 2
        assert counters['request_success_total{finished_reason="stop"}'] == 1
        assert counters['request_errors_total{code="TOKEN_OUT_OF_RANGE"}'] == 1
        assert counters['admission_rejections_total{reason="invalid"}'] == 1
        assert (counters["prompt_tokens_total"], counters["generation_tokens_total"]) == (6, 2)
        assert (stats.running, stats.connections) == (1, 1)
        assert stats.kv_slabs == {}  # no pool has said anything
        assert (stats.workers[0]["running"], stats.workers[0]["steps"]) == (1, 1)


# ---- limits --------------------------------------------------------------------------------------------------------


@on_uvloop
async def test_connection_limits() -> None:
    async with rig(connections_per_uid=2) as r:
        kept = [await r.client(), await r.client()]
        client = await r.dial()
        error = await client.hear_a(Error)
        assert (error.code, error.limit) == (Code.TOO_MANY_CONNECTIONS, 2)
        assert error.retry_after_ms > 0
        await client.closed()
        kept[0].sock.close()
        await until(lambda: len(r.sessions) == 1)
        await r.client()


@on_uvloop
async def test_live_requests_of_a_connection() -> None:
    async with rig(requests_per_connection=2) as r:
        worker, client = await r.worker(), await r.client()
        for request_id in (1, 2):
            await client.say(generate(), request_id)
        error = await client.refused(generate(), 3)
        assert (error.code, error.limit, error.retryable) == (Code.TOO_MANY_INFLIGHT, 2, True)
        key, _ = await worker.assigned()
        await worker.step([key, ids(1), {"finish": "length"}])
        await client.rest(1)
        await client.say(generate(), 3)
        assert (await worker.assigned())[0] == key + 1


@pytest.mark.parametrize(("setting", "limit"), [("queue_requests", 2), ("queue_tokens", 6)])
@on_uvloop
async def test_queue_limits(setting: str, limit: int) -> None:
    async with rig(**{setting: limit}) as r:
        client = await r.client()
        for request_id in (1, 2):
            await client.say(generate(), request_id)
        error = await client.refused(generate(), 3)
        assert (error.code, error.limit) == (Code.QUEUE_FULL, limit)
        assert error.retry_after_ms > 0


@on_uvloop
async def test_a_duplicate_id_leaves_the_first_alone() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        for _ in range(2):
            await client.ask({"tokens": [1]}, 1)
        key, _ = await worker.assigned()
        assert (await client.hear_a(Error, 1)).code == Code.DUPLICATE_ID
        await worker.step([key, ids(9), {"finish": "length"}])
        assert tokens_of(await client.rest(1)) == [9]


@on_uvloop
async def test_out_of_descriptors() -> None:
    async with rig() as r:
        first = await r.client()
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        with sock, no_descriptors():
            await asyncio.get_running_loop().sock_connect(sock, r.listener.getsockname())
            turned_away = Client(sock)
            assert (await turned_away.hear_a(Error)).code == Code.TOO_MANY_CONNECTIONS
            await turned_away.closed()
            await first.stats()
        await r.client()
        assert (await first.stats()).counters['connections_total{result="emfile"}'] == 1
