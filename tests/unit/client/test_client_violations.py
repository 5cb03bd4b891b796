"""Servers that break the protocol, and what may look like it and is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from colibri_client import AsyncClient, errors
from colibri_protocol.codec import encode, tokens_frame
from colibri_protocol.errors import Code
from colibri_protocol.framing import frame
from colibri_protocol.messages import (
    Bye,
    Cancel,
    Done,
    Error,
    Generate,
    HealthReply,
    LimitInfo,
    Pong,
    Scores,
    StatsReply,
    TokensOut,
    Welcome,
)
from fixtures.scripted_server import LIMITS, MODEL, Peer, Server, floats, oracle, pack, serve, until

PROMPT = [1, 2, 3]
WELCOME = Welcome(proto=1, server="scripted 1", generation=1, model=MODEL, limits=LIMITS)
UNKNOWN = 9999  # a request id that was never used
BROKEN: dict[str, tuple[Callable[[int], bytes], str]] = {
    "garbage": (lambda key: b"HTTP/1.1 400 Bad Request\r\n\r\n", "frame of"),
    "an empty frame": (lambda key: bytes(4), "length 0"),
    "an ext type": (lambda key: b"\0\0\0\7\x93\5\1\xd4\1\1\1", "type byte"),
    "a client's message": (lambda key: encode(Generate(tokens=pack([1])), key), "GENERATE is not sent by a server"),
    "tokens of an unknown request": (lambda key: tokens_frame(UNKNOWN, pack([1]), 0, 1), "not live"),
    "tokens without ids": (lambda key: frame(b"\x93\5" + bytes([key]) + b"\x80"), "ids is missing"),
    "a gap in the tokens": (lambda key: tokens_frame(key, pack([1]), 3, 1), "index 3; 2 is next"),
    "tokens twice": (lambda key: tokens_frame(key, pack([1]), 1, 1), "index 1; 2 is next"),
    "half the log probabilities": (lambda key: encode(TokensOut(ids=pack([1, 2]), index=2, logprobs=floats(-1.0)), key),
                                   "shorter|argument"),
    "log probabilities that fit no token": (lambda key: encode(TokensOut(
        ids=pack([1]), index=2, logprobs=floats(-1.0), top_ids=pack([1, 2]), top_logprobs=floats(-1.0)), key),
        "2 alternatives with 1 log probabilities"),
    "scores that nobody wanted": (lambda key: encode(Scores(index=1, logprobs=floats(-1.0)), key), "SCORES in answer"),
    "another answer": (lambda key: encode(HealthReply(live=True, ready=True, state="ready"), key), "HEALTH_REPLY in"),
    "an end twice": (lambda key: 2 * encode(Done(finish_reason="stop"), key), "not live"),
    "tokens after the end": (lambda key: encode(Done(finish_reason="stop"), key) + tokens_frame(key, pack([1]), 2, 1),
                             "not live"),
    "a second welcome": (lambda key: encode(WELCOME), "WELCOME again"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_server_that_breaks_the_protocol(path: Path, name: str) -> None:
    """Both requests of the connection learn of it, unless they had ended before; there is no second attempt."""
    data, reason = BROKEN[name]

    async def script(peer: Peer) -> None:
        await peer.welcome()
        _, first = await peer.expect(Generate)
        _, second = await peer.expect(Generate)
        peer.tokens(second, [1, 2], 0)
        peer.raw(data(second))
        await peer.expect_gone()

    async with Server(path, script, serve) as server, AsyncClient(path) as client:
        other, stream = client.generate([9]), client.generate(PROMPT)
        with pytest.raises(errors.ProtocolViolation, match=reason):
            await anext(other)
        assert stream.tokens[:2] == [1, 2]
        if "end" in name.split():
            assert stream.result.finish_reason == "stop"
        else:
            with pytest.raises(errors.ProtocolViolation, match=reason) as raised:
                _ = stream.result
            assert raised.value.tokens == [1, 2]
        assert len(server.peers) == 1
        assert (await client.complete(PROMPT, max_tokens=3)).tokens == oracle(PROMPT, 0, 3)  # on a new connection


@pytest.mark.parametrize(("call", "answer", "reason"), [
    (lambda c: c.health(), StatsReply(uptime_s=1.0), "STATS_REPLY in answer to HEALTH"),
    (lambda c: c.ping(), Pong(data=b"other"), "PONG with other data"),
    (lambda c: c.score(PROMPT), Scores(index=2, logprobs=floats(-1.0)), "SCORES of position 2; 1 is next"),
    (lambda c: c.score(PROMPT), Scores(index=1, logprobs=floats(-1.0), top_ids=pack([1])), "SCORES with 1 altern"),
    (lambda c: c.score(PROMPT), TokensOut(ids=pack([1])), "TOKENS in answer to SCORE"),
])  # fmt: skip
async def test_wrong_answers(path: Path, call: Callable[[AsyncClient], Any], answer: Any, reason: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome()
        _, key = await peer.next()
        peer.send(answer, key)
        await peer.expect_gone()

    async with Server(path, script), AsyncClient(path) as client:
        with pytest.raises(errors.ProtocolViolation, match=reason):
            await call(client)


async def test_any_cut_of_the_byte_stream_gives_the_same(path: Path) -> None:
    async def dribbles(peer: Peer) -> None:
        await peer.welcome()
        _, key = await peer.expect(Generate)
        frames = [tokens_frame(key, pack([i]), i, 1) for i in range(5)]
        for byte in b"".join(frames) + encode(Done(finish_reason="stop"), key):
            peer.raw(bytes([byte]))
            await asyncio.sleep(0)
        await peer.expect_gone()

    async with Server(path, dribbles), AsyncClient(path) as client:
        assert [t async for t in client.generate(PROMPT)] == [0, 1, 2, 3, 4]


async def test_what_comes_for_a_closed_stream_is_dropped(path: Path) -> None:
    """Until its end: tokens that were on their way, and DONE or ERROR, which make room for another."""

    async def script(peer: Peer) -> None:
        await peer.welcome(limits=LimitInfo(frame=1 << 20, requests=1))
        for end in (Done(finish_reason="abort"), Error(code=Code.CANCELLED, message="ended")):
            _, key = await peer.expect(Generate)
            await peer.expect(Cancel)
            peer.tokens(key, [1], 0)
            peer.send(end, key)
        _, key = await peer.expect(Generate)
        peer.done(key)
        await peer.expect(Bye)

    async with Server(path, script) as server, AsyncClient(path) as client:
        for count in (1, 2):
            stream = client.generate(PROMPT)
            await until(lambda: server.peers[0].count(Generate) == count)  # noqa: B023
            stream.close()
        assert (await client.complete(PROMPT)).finish_reason == "length"
