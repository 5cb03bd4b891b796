"""What the client does by itself: retries, reconnecting, resuming."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from colibri_client import AsyncClient, errors
from colibri_client.retry import Policy
from colibri_protocol.errors import Code, retryable
from colibri_protocol.messages import (
    Bye,
    Cancel,
    Credit,
    Error,
    Generate,
    LimitInfo,
    Model,
    Receipt,
    Resume,
    Score,
    Scores,
)
from fixtures.scripted_server import MODEL, Peer, Script, Server, floats, oracle, pack, serve, unpack, until

PROMPT = [1, 2, 3]
Quick = Callable[..., AsyncClient]


# ---- retries ----


def refusing(times: int, code: Code = Code.QUEUE_FULL, **fields: Any) -> tuple[Script, list[float]]:
    """Refuses so many requests, then serves; and when each came."""
    came: list[float] = []

    async def script(peer: Peer) -> None:
        await peer.welcome()
        for _ in range(times):
            _, key = await peer.expect(Generate)
            came.append(asyncio.get_running_loop().time())
            peer.send(Error(code=code, message="full", retryable=retryable(code, 0), **fields), key)
        _, key = await peer.expect(Generate)
        came.append(asyncio.get_running_loop().time())
        peer.done(key)
        await peer.expect_gone()

    return script, came


async def test_a_full_queue_is_tried_again(path: Path, quick: Quick) -> None:
    script, came = refusing(3, retry_after_ms=30)
    async with Server(path, script), quick() as client:
        assert (await client.complete(PROMPT)).finish_reason == "length"
    assert all(after - before >= 0.029 for before, after in zip(came, came[1:], strict=False))


async def test_the_fourth_refusal_is_final(path: Path, quick: Quick) -> None:
    script, came = refusing(4)
    async with Server(path, script), quick() as client:
        with pytest.raises(errors.QueueFull):
            await client.complete(PROMPT)
        assert len(came) == 4
        await client.complete(PROMPT)


async def test_retries_can_be_turned_off(path: Path) -> None:
    script, came = refusing(1)
    async with Server(path, script), AsyncClient(path, retries=0) as client:
        with pytest.raises(errors.QueueFull):
            await client.complete(PROMPT)
        await client.complete(PROMPT)


async def test_what_is_not_retryable_is_not_retried(path: Path, quick: Quick) -> None:
    script, came = refusing(1, Code.NEVER_FITS)
    async with Server(path, script), quick() as client:
        with pytest.raises(errors.NeverFits):
            await client.complete(PROMPT)
        assert len(came) == 1
        await client.complete(PROMPT)


@pytest.mark.parametrize("close", [False, True])
async def test_a_request_can_be_cancelled_between_attempts(path: Path, close: bool) -> None:
    script, came = refusing(1, retry_after_ms=60_000)
    async with Server(path, script), AsyncClient(path) as client:
        stream = client.generate(PROMPT)
        await until(lambda: client._session._delayed)
        stream.close() if close else stream.cancel()
        assert [token async for token in stream] == []
        await until(lambda: not client._session._delayed)
        assert stream.result.finish_reason == "abort"
        await client.complete(PROMPT)
    assert len(came) == 2


async def test_an_error_after_tokens_is_retried_by_resuming(path: Path, quick: Quick) -> None:
    whole = oracle(PROMPT, 9, 6)

    async def script(peer: Peer) -> None:
        await peer.welcome()
        _, key = await peer.expect(Generate)
        peer.tokens(key, whole[:2], 0)
        peer.send(Error(code=Code.KV_EXHAUSTED, message="no room", retryable=True, tokens_sent=2), key)
        message, key = await peer.expect(Generate)
        assert (unpack(message.resume.tokens), message.resume.seed) == (whole[:2], 9)
        peer.tokens(key, whole[2:], 2)
        peer.done(key, 6)
        await peer.expect(Bye)

    async with Server(path, script), quick() as client:
        stream = client.generate(PROMPT, seed=9, max_tokens=6)
        assert [token async for token in stream] == whole


# ---- lost connections ----


@pytest.mark.parametrize("index", range(13))
async def test_the_connection_breaks_after_any_number_of_tokens(path: Path, index: int) -> None:
    """12 tokens; after the 12th only DONE is missing."""

    async def breaks(peer: Peer) -> None:
        await peer.welcome()
        message, key = await peer.expect(Generate)
        for i, token in enumerate(oracle(PROMPT, message.seed, index)):
            peer.tokens(key, [token], i)

    async with Server(path, breaks, serve) as server, AsyncClient(path) as client:
        stream = client.generate(PROMPT, max_tokens=12, temperature=0.7)
        tokens = [token async for token in stream]
        assert tokens == oracle(PROMPT, stream.result.seed, 12)
        assert [token.index for token in tokens] == list(range(12))
        first, second = (p.heard[1][0] for p in server.peers)
        assert first.seed == second.seed == stream.result.seed
        assert (second.resume is None) == (index == 0)


async def test_it_breaks_again_and_again(path: Path, quick: Quick) -> None:
    """No end of losses is too many as long as tokens arrive in between."""
    scripts = [partial(serve, dies_after=7)] * 8
    async with Server(path, *scripts, serve) as server, quick() as client:
        outputs = await asyncio.gather(*(client.complete(PROMPT, max_tokens=20, seed=s) for s in range(4)))
        assert [o.tokens for o in outputs] == [oracle(PROMPT, s, 20) for s in range(4)]
        assert len(server.peers) == 9


async def test_scores_start_over(path: Path) -> None:
    async def breaks(peer: Peer) -> None:
        await peer.welcome()
        _, key = await peer.expect(Score)
        peer.send(Scores(index=1, logprobs=floats(-1.0)), key)

    async def scores(peer: Peer) -> None:
        await peer.welcome()
        _, key = await peer.expect(Score)
        peer.send(Scores(index=1, logprobs=floats(-1.0, -2.0)), key)
        peer.done(key)
        await peer.expect(Bye)

    async with Server(path, breaks, scores), AsyncClient(path) as client:
        assert list(await client.score(PROMPT)) == [-1.0, -2.0]


@pytest.mark.parametrize("tokens", [0, 1])
async def test_prompt_scores_are_there_once(path: Path, tokens: int) -> None:
    """If no token has come, all starts over; else the scores are complete and not asked for again."""

    async def breaks(peer: Peer) -> None:
        await peer.welcome()
        _, key = await peer.expect(Generate)
        peer.send(Scores(index=1, logprobs=floats(-1.0)), key)
        if tokens:
            peer.tokens(key, oracle(PROMPT, 0, 1), 0)

    async def goes_on(peer: Peer) -> None:
        await peer.welcome()
        message, key = await peer.expect(Generate)
        assert message.prompt_logprobs == (None if tokens else 0)
        if not tokens:
            peer.send(Scores(index=1, logprobs=floats(-1.0)), key)
        peer.tokens(key, oracle(PROMPT, 0, 2)[tokens:], tokens)
        peer.done(key, 2)
        await peer.expect(Bye)

    async with Server(path, breaks, goes_on), AsyncClient(path) as client:
        result = await client.complete(PROMPT, prompt_logprobs=0, max_tokens=2)
    assert list(result.prompt_scores) == [-1.0]
    assert result.tokens == oracle(PROMPT, 0, 2)


OTHER = replace(MODEL, id="c" * 64, pinned=4, window=8, positions="absolute", kv_format="f32")


@pytest.mark.parametrize("generation", [1, 2])
async def test_who_resumes_says_what_made_the_output(path: Path, generation: int) -> None:
    """The daemon served another model by the time the request came, or not; then a third one. It may refuse."""
    made = {1: MODEL, 2: OTHER}[generation]

    async def breaks(peer: Peer) -> None:
        await peer.welcome()
        _, key = await peer.expect(Generate)
        peer.send(Model(generation=2, model=OTHER))
        peer.tokens(key, [7], 0, generation=generation)
        peer.tokens(key, [8], 1)

    async def refuses(peer: Peer) -> None:
        await peer.welcome(replace(MODEL, id="d" * 64))
        message, key = await peer.expect(Generate)
        assert message.resume.receipt == Receipt(
            model_id=made.id, fingerprint=made.fingerprint, seed=3, pinned=made.pinned, window=made.window,
            positions=made.positions, kv_format=made.kv_format)  # fmt: skip
        peer.send(Error(code=Code.MODEL_MISMATCH, message="another model", tokens_sent=0), key)
        await peer.expect(Bye)

    async with Server(path, breaks, refuses), AsyncClient(path) as client:
        stream = client.generate(PROMPT, max_tokens=9, seed=3)
        with pytest.raises(errors.RequestError, match="another model") as raised:
            [token async for token in stream]
        assert raised.value.tokens == [7, 8]


async def test_a_receipt_given_by_the_caller_is_kept(path: Path) -> None:
    receipt = Receipt(model_id="e" * 64, fingerprint="f" * 64, seed=3, window=77)

    async def takes(peer: Peer, breaks: bool) -> None:
        await peer.welcome()
        message, key = await peer.expect(Generate)
        assert message.resume.receipt == receipt
        peer.tokens(key, [8], len(message.resume.tokens) // 4, generation=1)
        if not breaks:
            peer.done(key, 3)
            await peer.expect(Bye)

    async with Server(path, partial(takes, breaks=True), partial(takes, breaks=False)), AsyncClient(path) as client:
        resume = Resume(tokens=pack([7]), seed=3, receipt=receipt)
        assert (await client.complete(PROMPT, max_tokens=3, resume=resume)).tokens == [7, 8, 8]


async def test_the_deadline_runs_on(path: Path) -> None:
    async def breaks(peer: Peer) -> None:
        await peer.welcome()
        await peer.expect(Generate)
        await asyncio.sleep(0.05)

    async def looks(peer: Peer) -> None:
        await peer.welcome()
        message, key = await peer.expect(Generate)
        assert 1 <= message.deadline_ms <= 1000 - 49
        peer.done(key)
        await peer.expect(Bye)

    async with Server(path, breaks, looks), AsyncClient(path) as client:
        await client.complete(PROMPT, deadline_ms=1000)


async def test_a_daemon_that_is_away_for_a_while(path: Path, quick: Quick) -> None:
    client = quick()
    async with Server(path, partial(serve, dies_after=3)) as first:
        await client.connect()
        await first.stop()
        stream = client.generate(PROMPT, max_tokens=9)
        await until(lambda: client._session._dialing)
        new = client.generate([4], max_tokens=2)
    async with Server(path, serve):
        assert [token async for token in stream] == oracle(PROMPT, 0, 9)
        assert [token async for token in new] == oracle([4], 0, 2)
        await client.close()


async def test_a_daemon_that_does_not_come_back(path: Path, quick: Quick) -> None:
    impatient = Policy(reconnect=0.05, base=0.001)
    async with Server(path, partial(serve, dies_after=3)) as server, quick(impatient) as client:
        await server.stop()
        with pytest.raises(errors.ConnectionLost, match="no new one could be made: .* no socket here") as raised:
            await client.complete(PROMPT)
        assert raised.value.tokens == oracle(PROMPT, 0, 3)
        with pytest.raises(errors.ConnectionFailed):  # at once
            await client.complete(PROMPT)


async def test_closing_while_there_is_no_connection(path: Path) -> None:
    async with Server(path, partial(serve, dies_after=3)) as server:
        client = AsyncClient(path)
        await client.connect()
        await server.stop()
        streams = [client.generate(PROMPT, max_tokens=9) for _ in range(2)]
        await until(lambda: client._session._dialing)
        await client.close()
        for stream in streams:
            with pytest.raises(errors.ClientClosed):
                [token async for token in stream]


async def test_reconnecting_can_be_turned_off(path: Path) -> None:
    async with Server(path, partial(serve, dies_after=3), serve), AsyncClient(path, reconnect=0) as client:
        with pytest.raises(errors.ConnectionLost):
            await client.complete(PROMPT)
        await client.complete(PROMPT)


async def test_a_request_that_ends_every_connection(path: Path, quick: Quick) -> None:
    """Gives up in the end, with pauses in between."""
    async with Server(path, partial(serve, dies_after=0)) as server:
        async with quick(Policy(reconnect=0.1, base=0.01)) as client:
            with pytest.raises(errors.ConnectionLost):
                await client.complete(PROMPT)
        assert 2 <= len(server.peers) <= 12


async def test_a_cancelled_request_is_not_taken_up_again(path: Path) -> None:
    async def breaks(peer: Peer) -> None:
        await peer.welcome()
        _, key = await peer.expect(Generate)
        peer.tokens(key, [5], 0)
        await peer.expect(Cancel)

    async with Server(path, breaks) as server, AsyncClient(path) as client:
        stream = client.generate(PROMPT)
        assert await anext(stream) == 5
        stream.cancel()
        assert [token async for token in stream] == []
        assert (stream.result.finish_reason, stream.result.tokens) == ("abort", [5])
        assert len(server.peers) == 1


@pytest.mark.parametrize(("code", "again"), [(Code.READ_TIMEOUT, True), (Code.SLOW_READER, False)])
async def test_an_error_that_ends_the_connection(path: Path, code: Code, again: bool) -> None:
    async def ends(peer: Peer) -> None:
        await peer.welcome()
        _, key = await peer.expect(Generate)
        peer.tokens(key, oracle(PROMPT, 0, 1), 0)
        peer.send(Error(code=code, message="so", retryable=retryable(code, 0)))
        await peer.expect_gone()

    async with Server(path, ends, serve), AsyncClient(path) as client:
        stream = client.generate(PROMPT, max_tokens=4)
        if again:
            assert [token async for token in stream] == oracle(PROMPT, 0, 4)
        else:
            assert await anext(stream) == oracle(PROMPT, 0, 1)[0]
            with pytest.raises(errors.SlowReader) as raised:
                await anext(stream)
            assert raised.value.tokens == oracle(PROMPT, 0, 1)


async def test_a_backlog_is_read_before_more_is_granted(path: Path) -> None:
    """A reader that has stopped: each new connection may send one window, and no more until all before is read."""
    limits = LimitInfo(frame=1 << 20, requests=8, credit=16)
    scripts = partial(serve, limits=limits, dies_after=16), partial(serve, limits=limits)
    async with Server(path, *scripts) as server, AsyncClient(path) as client:
        stream = client.generate(PROMPT, max_tokens=200)
        await until(lambda: len(stream.tokens) == 16)
        server.peers[0].close()
        await until(lambda: len(stream.tokens) == 32)
        tokens = [await anext(stream) for _ in range(16)]
        await client.ping()
        assert server.peers[1].count(Credit) == 0
        tokens += [token async for token in stream]
        assert tokens == oracle(PROMPT, 0, 200)
