"""Connections: handshake, limits, time-outs, flow control, ends, and what hostile clients get."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from colibri_daemon.common import ipc
from colibri_daemon.common.exit_codes import Exit
from colibri_daemon.common.pages import Field, State
from colibri_daemon.dispatcher.handlers import HANDLERS
from colibri_daemon.dispatcher.session import Timeouts
from colibri_protocol.errors import Code
from colibri_protocol.message import MESSAGES, SERVER
from colibri_protocol.messages import (
    Bye,
    Credit,
    Done,
    Error,
    GoAway,
    Health,
    HealthReply,
    Hello,
    Ping,
    Pong,
    TokenCheck,
    TokenCheckReply,
    TokensOut,
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


# ---- bad input -----------------------------------------------------------------------------------------------------

BAD_FIELDS = [
    ({"tokens": b""}, Code.PROMPT_EMPTY, "tokens"),
    ({"tokens": [-1]}, Code.TOKEN_OUT_OF_RANGE, "tokens"),
    ({"tokens": [1, 100]}, Code.TOKEN_OUT_OF_RANGE, "tokens"),
    ({"tokens": [1 << 31]}, Code.TOKEN_OUT_OF_RANGE, "tokens"),
    ({"tokens": [1.0]}, Code.INVALID_ARGUMENT, "tokens"),
    ({"tokens": [True]}, Code.INVALID_ARGUMENT, "tokens"),
    ({"tokens": "1"}, Code.INVALID_ARGUMENT, "tokens"),
    ({"tokens": b"abc"}, Code.INVALID_ARGUMENT, "tokens"),
    ({"tokens": [1] * MAX_LEN}, Code.PROMPT_TOO_LONG, "tokens"),
    ({"max_tokens": -1}, Code.INVALID_ARGUMENT, "max_tokens"),
    ({"max_tokens": 1 << 63}, Code.INVALID_ARGUMENT, "max_tokens"),
    ({"min_tokens": 3, "max_tokens": 2}, Code.INVALID_ARGUMENT, "min_tokens"),
    ({"temperature": float("nan")}, Code.INVALID_ARGUMENT, "temperature"),
    ({"stop_ids": [5, 100]}, Code.TOKEN_OUT_OF_RANGE, "stop_ids"),
    ({"stop_ids": None}, Code.INVALID_ARGUMENT, "stop_ids"),
    ({"stop_seqs": [b""]}, Code.INVALID_ARGUMENT, "stop_seqs"),
    ({"stop_seqs": [[1], [100]]}, Code.TOKEN_OUT_OF_RANGE, "stop_seqs"),
    ({"logit_bias": {100: 1.0}}, Code.TOKEN_OUT_OF_RANGE, "logit_bias"),
    ({"logit_bias": {1: float("inf")}}, Code.INVALID_ARGUMENT, "logit_bias"),
    ({"tenant": "someone"}, Code.PERMISSION, "tenant"),
    ({"model": "another"}, Code.MODEL_MISMATCH, "model"),
    ({"resume": {"tokens": [1, 2, 3]}, "max_tokens": 2}, Code.INVALID_ARGUMENT, "resume.tokens"),
    ({"resume": {"tokens": [100]}}, Code.TOKEN_OUT_OF_RANGE, "resume.tokens"),
]


def frame(value: object) -> bytes:
    """Whatever a client may think is a message."""
    return ipc.pack(value)


@on_uvloop
async def test_bad_requests_get_code_and_field_and_nobody_else_notices() -> None:
    async with rig() as r:
        worker, client, other = await r.worker(), await r.client(), await r.client()
        await other.say(generate(), 1)
        key, _ = await worker.assigned()
        for n, (fields, code, field) in enumerate(BAD_FIELDS):
            await client.ask({"tokens": [1], **fields}, n + 1)
            error = (await client.hear())[0]
            assert (error.code, error.field, error.retryable) == (code, field, False), fields
        await client.ask({"tokens": [1], "max_tokens": 0, "no such field": 1}, 1000)
        assert isinstance((await client.hear())[0], Done)
        await client.raw(frame([77, 1001, {}]))
        assert (await client.hear())[0].code == Code.PROTOCOL
        await client.raw(frame([200, 1002, {}]))  # ignorable
        await client.stats()
        await worker.step([key, ids(9), {"finish": "length"}])
        assert tokens_of(await other.rest(1)) == [9]


BAD_FRAMES = {
    "length 0": bytes(4),
    "too long": (1 << 21).to_bytes(4, "big"),
    "length 2^32-1": b"\xff" * 4,
    "array bomb": (70_000).to_bytes(4, "big") + b"\xdc\x00\x10" * 23_333 + b"\x00",
    "huge array": (5).to_bytes(4, "big") + b"\xdd" + b"\xff" * 4,
    "ext type": frame([3, 1]) + (3).to_bytes(4, "big") + b"\xd4\x01\x00",
    "reserved byte": (1).to_bytes(4, "big") + b"\xc1",
    "a request without an id": frame([3, 0, {"tokens": [1]}]),
    "a message of the server's": frame([2, 0, {}]),
    "HELLO again": frame([1, 0, {"proto_min": 1, "proto_max": 1}]),
    "noise": bytes(range(255, 0, -1)),
}


@pytest.mark.parametrize("data", BAD_FRAMES.values(), ids=BAD_FRAMES)
@on_uvloop
async def test_bad_frames_end_their_connection_only(data: bytes) -> None:
    async with rig() as r:
        worker, client, other = await r.worker(), await r.client(), await r.client()
        await client.say(generate(), 1)
        key, _ = await worker.assigned()
        await client.raw(data)
        error = await client.hear_a(Error)
        assert error.code in (Code.PROTOCOL, Code.FRAME_TOO_LARGE)
        await client.closed()
        await worker.told(ipc.CANCEL, key, "abort")
        await other.stats()


@on_uvloop
async def test_credit_that_was_not_negotiated() -> None:
    async with rig() as r:
        client = await r.client()
        await client.raw(frame([9, 1, {"tokens": 5}]))
        assert (await client.hear_a(Error)).code == Code.UNSUPPORTED
        await client.closed()


@on_uvloop
async def test_a_fault_of_ours_has_an_incident_id(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("made up")

    monkeypatch.setitem(HANDLERS, Health, broken)
    async with rig() as r:
        client, other = await r.client(), await r.client()
        await client.say(Health(), 1)
        error = await client.hear_a(Error)
        assert error.code == Code.INTERNAL
        assert "incident" in error.message
        await client.closed()
        await other.stats()


# ---- time ----------------------------------------------------------------------------------------------------------


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


# ---- flow control --------------------------------------------------------------------------------------------------


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
        steps = 0
        while not r.paused:
            await worker.step(*[[key, ids(*[steps % 100] * 100), None]] * 10)
            steps += 1
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
        while not r.paused:
            await worker.step(*[[key, ids(*[1] * 100), None]] * 10)
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
        most = 0
        while len(r.sessions) == 2 and not r.closing:
            await worker.step(*[[key, ids(*[1] * 100), None]] * 10)
            most = max(most, r.unread)
        assert most < 2_000_000
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

        async def flood() -> None:
            nonlocal most
            while True:
                await client.raw(ping)
                most = max(most, r.unread)

        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            await flood()
        assert 0 < most < 2_000_000
        assert not r.sessions


# ---- ends ----------------------------------------------------------------------------------------------------------


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
