"""What a client may get wrong in a request: the right code and field, and the connection and its neighbours go on."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
from colibri_protocol.errors import Code
from fixtures.daemon import Daemon
from fixtures.models import Models

GENERATE, TOKENS, DONE, ERROR = 3, 5, 6, 7
VOCAB, MAX_LEN = 2048, 600


@pytest.fixture(scope="module")
def daemon(models: Models) -> Iterator[Daemon]:
    with Daemon(models.tiny("q4"), max_tokens_total=MAX_LEN) as running:
        yield running


class Raw:
    """A connection that says what it is told, without our client or protocol package."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, *messages: tuple[int, int, Any]) -> None:
        """Each a (type, id, body); all in one write."""
        payloads = [msgpack.packb(message) for message in messages]
        self.writer.write(b"".join(struct.pack(">I", len(payload)) + payload for payload in payloads))

    async def hear(self) -> tuple[int, int, dict[str, Any]]:
        (size,) = struct.unpack(">I", await self.reader.readexactly(4))
        tag, id, body = msgpack.unpackb(await self.reader.readexactly(size), strict_map_key=False)
        return tag, id, body

    async def answer(self, id: int) -> tuple[list[int], dict[str, Any], int]:
        """(tokens, last body, its tag) of one request."""
        tokens: list[int] = []
        while True:
            tag, heard, body = await self.hear()
            assert heard == id
            if tag in (DONE, ERROR):
                return tokens, body, tag
            tokens += struct.unpack(f"<{len(body['ids']) // 4}I", body["ids"])


@asynccontextmanager
async def connected(daemon: Daemon) -> AsyncIterator[Raw]:
    raw = Raw(*await asyncio.open_unix_connection(str(daemon.socket)))
    try:
        raw.say((1, 0, {"proto_min": 1, "proto_max": 1}))
        assert (await raw.hear())[0] == 2
        yield raw
    finally:
        raw.writer.close()
        await raw.writer.wait_closed()


BAD = {
    "empty prompt": ({"tokens": []}, Code.PROMPT_EMPTY, "tokens"),
    "empty prompt as binary": ({"tokens": b""}, Code.PROMPT_EMPTY, "tokens"),
    "no prompt": ({}, Code.INVALID_ARGUMENT, "tokens"),
    "id -1": ({"tokens": [1, -1]}, Code.TOKEN_OUT_OF_RANGE, "tokens"),
    "id vocab": ({"tokens": [1, 2, VOCAB]}, Code.TOKEN_OUT_OF_RANGE, "tokens"),
    "id 2^31": ({"tokens": [2**31]}, Code.TOKEN_OUT_OF_RANGE, "tokens"),
    "id 2^32": ({"tokens": [2**32]}, Code.TOKEN_OUT_OF_RANGE, "tokens"),
    "id vocab in binary": ({"tokens": struct.pack("<3I", 1, 2, VOCAB)}, Code.TOKEN_OUT_OF_RANGE, "tokens"),
    "float id": ({"tokens": [1, 2.0]}, Code.INVALID_ARGUMENT, "tokens"),
    "bool id": ({"tokens": [True]}, Code.INVALID_ARGUMENT, "tokens"),
    "text id": ({"tokens": ["1"]}, Code.INVALID_ARGUMENT, "tokens"),
    "text prompt": ({"tokens": "hello"}, Code.INVALID_ARGUMENT, "tokens"),
    "odd binary": ({"tokens": b"12345"}, Code.INVALID_ARGUMENT, "tokens"),
    "too long by one": ({"tokens": [1] * MAX_LEN}, Code.PROMPT_TOO_LONG, "tokens"),
    "max_tokens -1": ({"tokens": [1], "max_tokens": -1}, Code.INVALID_ARGUMENT, "max_tokens"),
    "max_tokens 2^63": ({"tokens": [1], "max_tokens": 2**63}, Code.INVALID_ARGUMENT, "max_tokens"),
    "max_tokens null": ({"tokens": [1], "max_tokens": None}, Code.INVALID_ARGUMENT, "max_tokens"),
    "temperature NaN": ({"tokens": [1], "temperature": math.nan}, Code.INVALID_ARGUMENT, "temperature"),
    "temperature inf": ({"tokens": [1], "temperature": math.inf}, Code.INVALID_ARGUMENT, "temperature"),
    "temperature -1": ({"tokens": [1], "temperature": -1}, Code.INVALID_ARGUMENT, "temperature"),
    "top_p 0": ({"tokens": [1], "top_p": 0}, Code.INVALID_ARGUMENT, "top_p"),
    "logprobs 21": ({"tokens": [1], "logprobs": 21}, Code.INVALID_ARGUMENT, "logprobs"),
    "stop id vocab": ({"tokens": [1], "stop_ids": [VOCAB]}, Code.TOKEN_OUT_OF_RANGE, "stop_ids"),
    "stop ids null": ({"tokens": [1], "stop_ids": None}, Code.INVALID_ARGUMENT, "stop_ids"),
    "stop id null": ({"tokens": [1], "stop_ids": [None]}, Code.INVALID_ARGUMENT, "stop_ids"),
    "65 stop ids": ({"tokens": [1], "stop_ids": [3] * 65}, Code.INVALID_ARGUMENT, "stop_ids"),
    "stop sequence out of range": ({"tokens": [1], "stop_seqs": [[1], [VOCAB]]}, Code.TOKEN_OUT_OF_RANGE, "stop_seqs"),
    "empty stop sequence": ({"tokens": [1], "stop_seqs": [[]]}, Code.INVALID_ARGUMENT, "stop_seqs"),
    "bias of a bad id": ({"tokens": [1], "logit_bias": {VOCAB: 1.0}}, Code.TOKEN_OUT_OF_RANGE, "logit_bias"),
    "bias inf": ({"tokens": [1], "logit_bias": {3: math.inf}}, Code.INVALID_ARGUMENT, "logit_bias"),
    "bias text key": ({"tokens": [1], "logit_bias": {"3": 1.0}}, Code.INVALID_ARGUMENT, "logit_bias"),
    "another model": ({"tokens": [1], "model": "gpt-5"}, Code.MODEL_MISMATCH, "model"),
    "tenant by an untrusted user": ({"tokens": [1], "tenant": "a"}, Code.PERMISSION, "tenant"),
    "resume beyond max_tokens": ({"tokens": [1], "max_tokens": 2, "resume": {"tokens": [1, 2, 3], "seed": 0}},
                                 Code.INVALID_ARGUMENT, "resume"),
    "deadline 0": ({"tokens": [1], "deadline_ms": 0}, Code.INVALID_ARGUMENT, "deadline_ms"),
    "body is a list": ([1, 2], Code.INVALID_ARGUMENT, "body"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_field(daemon: Daemon, name: str) -> None:
    body, code, field = BAD[name]
    good = {"tokens": [5, 6, 7], "max_tokens": 30, "ignore_eos": True}
    async with connected(daemon) as raw, connected(daemon) as neighbour:
        neighbour.say((GENERATE, 9, good))
        raw.say((GENERATE, 1, body))
        _, error, tag = await raw.answer(1)
        assert (tag, error["code"], error.get("field", "").split(".")[0]) == (ERROR, code, field)
        assert "retryable" not in error
        raw.say((GENERATE, 1, good))
        tokens, done, _ = await raw.answer(1)
        assert (len(tokens), done["finish_reason"]) == (30, "length")
        assert (await neighbour.answer(9))[0] == tokens


async def test_zero_tokens_and_unknown_fields_are_valid(daemon: Daemon) -> None:
    async with connected(daemon) as raw:
        raw.say((GENERATE, 1, {"tokens": [1, 2], "max_tokens": 0, "no_such_field": {"a": [1]}}))
        tokens, done, tag = await raw.answer(1)
        assert (tokens, tag, done["finish_reason"], done["usage"]) == ([], DONE, "length", {"prompt": 2})


async def test_the_longest_prompt_is_served(daemon: Daemon) -> None:
    async with connected(daemon) as raw:
        raw.say((GENERATE, 1, {"tokens": [1] * (MAX_LEN - 1), "max_tokens": 10, "ignore_eos": True}))
        tokens, done, _ = await raw.answer(1)
        assert (len(tokens), done["finish_reason"], done["receipt"]["max_tokens"]) == (1, "length", 1)


async def test_duplicate_live_id(daemon: Daemon) -> None:
    """The second is refused, the first goes on."""
    async with connected(daemon) as raw:
        raw.say((GENERATE, 4, {"tokens": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}),
                (GENERATE, 4, {"tokens": [1], "max_tokens": 1}))
        refused, tokens = [], 0
        while True:
            tag, _, body = await raw.hear()
            if tag == ERROR:
                refused.append(body["code"])
            elif tag == DONE:
                break
            else:
                tokens += len(body["ids"]) // 4
        assert (refused, tokens) == ([Code.DUPLICATE_ID], 200)
        raw.say((GENERATE, 4, {"tokens": [1], "max_tokens": 1, "ignore_eos": True}))
        assert (await raw.answer(4))[2] == DONE


async def test_unknown_types(daemon: Daemon) -> None:
    """From 128 on: ignored. Below, with a request id: that request fails. With id 0: the connection does."""
    async with connected(daemon) as raw:
        raw.say((200, 0, {}), (200, 5, {}), (77, 5, {}))
        _, error, tag = await raw.answer(5)
        assert (tag, error["code"]) == (ERROR, Code.PROTOCOL)
        raw.say((GENERATE, 5, {"tokens": [1], "max_tokens": 1, "ignore_eos": True}))
        assert (await raw.answer(5))[2] == DONE
        raw.say((77, 0, {}))
        tag, id, body = await raw.hear()
        assert (tag, id, body["code"]) == (ERROR, 0, Code.PROTOCOL)
        assert await raw.reader.read() == b""
