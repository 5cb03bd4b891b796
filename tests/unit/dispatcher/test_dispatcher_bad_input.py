"""What hostile clients get, and that nobody else notices."""

from __future__ import annotations

import pytest
from colibri_daemon.common import ipc
from colibri_daemon.dispatcher.handlers import HANDLERS
from colibri_protocol.errors import Code
from colibri_protocol.messages import Done, Error, Health
from dispatched import MAX_LEN, generate, ids, on_uvloop, rig, tokens_of

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
