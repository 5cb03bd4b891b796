"""Streams of the asyncio client: order, multiplexing, ends of every kind, flow control."""

from __future__ import annotations

import asyncio
import gc
from functools import partial
from pathlib import Path

import pytest
from colibri_client import AsyncClient, Completion, Token, errors
from colibri_protocol.messages import (
    Bye,
    Cancel,
    Credit,
    Done,
    Generate,
    LimitInfo,
    Receipt,
    Score,
    Scores,
    StopMatch,
    Times,
    TokenCheck,
    TokenCheckReply,
    Usage,
)
from fixtures.scripted_server import LIMITS, MODEL, Peer, Server, floats, never_done, oracle, pack, serve, unpack, until

PROMPT = [1, 2, 3]


async def test_tokens_come_in_order_and_the_result_says_the_rest(path: Path) -> None:
    receipt = Receipt(model_id=MODEL.id, fingerprint=MODEL.fingerprint, seed=7)

    async def script(peer: Peer) -> None:
        await peer.welcome()
        message, key = await peer.expect(Generate)
        assert message == Generate(tokens=pack(PROMPT), max_tokens=4, seed=7, temperature=0.5, stop_ids=pack([9]))
        peer.tokens(key, [5], 0, step=1, cached_tokens=2)
        peer.tokens(key, [6, 9], 1, step=3)
        peer.send(Done(finish_reason="stop", stop_match=StopMatch(kind="id", value=9), seed=7, worker=1,
                       usage=Usage(prompt=3, cached=2, generated=3), times=Times(queue=1.5), receipt=receipt), key)
        await peer.expect(Bye)

    async with Server(path, script), AsyncClient(path) as client:
        stream = client.generate(PROMPT, max_tokens=4, seed=7, temperature=0.5, stop_ids=[9])
        with pytest.raises(errors.ColibriError, match="not ended"):
            _ = stream.result
        tokens = [token async for token in stream]
        assert tokens == [5, 6, 9]
        assert all(type(token) is Token for token in tokens)
        assert [token.index for token in tokens] == [0, 1, 2]
        assert [token.logprob for token in tokens] == [None] * 3
        assert stream.result == Completion([5, 6, 9], "stop", StopMatch(kind="id", value=9),
                                           Usage(prompt=3, cached=2, generated=3), Times(queue=1.5), 7, 1, receipt)
        assert [token async for token in stream] == []


async def test_log_probabilities_of_prompt_and_output(path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome()
        message, key = await peer.expect(Generate)
        assert (message.logprobs, message.prompt_logprobs) == (2, 1)
        peer.send(Scores(index=1, logprobs=floats(-1.0), top_ids=pack([8]), top_logprobs=floats(-0.5)), key)
        peer.send(Scores(index=2, logprobs=floats(-9999.0), top_ids=pack([3]), top_logprobs=floats(-0.25)), key)
        peer.tokens(key, [5, 6], 0, logprobs=floats(-0.5, -2.0), top_ids=pack([5, 1, 7, 6]),
                    top_logprobs=floats(-0.5, -1.0, -1.5, -2.0))
        peer.done(key, 2)
        await peer.expect(Bye)

    async with Server(path, script), AsyncClient(path) as client:
        result = await client.complete(PROMPT, max_tokens=2, logprobs=2, prompt_logprobs=1)
    assert [t.logprob for t in result.tokens] == [-0.5, -2.0]
    assert [t.top for t in result.tokens] == [((5, -0.5), (1, -1.0)), ((7, -1.5), (6, -2.0))]
    assert list(result.prompt_scores) == [-1.0, float("-inf")]
    assert result.prompt_scores.top == [((8, -0.5),), ((3, -0.25),)]


async def test_scores(path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome()
        message, key = await peer.expect(Score)
        assert (message.top, message.start, message.tokens) == (1, 2, pack([1, 2, 3, 4]))
        peer.send(Scores(index=2, logprobs=floats(-1.0), top_ids=pack([8]), top_logprobs=floats(-0.5)), key)
        peer.send(Scores(index=3, logprobs=floats(-2.0), top_ids=pack([4]), top_logprobs=floats(-2.0)), key)
        peer.done(key)
        await peer.expect(Bye)

    async with Server(path, script), AsyncClient(path) as client:
        scores = await client.score([1, 2, 3, 4], top=1, start=2)
    assert list(scores) == [-1.0, -2.0]
    assert (len(scores), scores[1], scores[:1], scores.start) == (2, -2.0, [-1.0], 2)
    assert scores.top == [((8, -0.5),), ((4, -2.0),)]


async def test_token_check(path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome()
        message, key = await peer.expect(TokenCheck)
        assert message.max_tokens == 9
        peer.send(TokenCheckReply(prompt_tokens=3, max_tokens=9, slabs=1), key)
        await peer.expect(Bye)

    async with Server(path, script), AsyncClient(path) as client:
        assert (await client.token_check(PROMPT, max_tokens=9)).slabs == 1


async def test_many_streams_share_one_connection_and_one_write(path: Path) -> None:
    async with Server(path, serve) as server, AsyncClient(path) as client:
        async def read(seed: int) -> list[int]:
            return [token async for token in client.generate(PROMPT, max_tokens=50, seed=seed)]

        outputs = await asyncio.gather(*(read(seed) for seed in range(40)))
        assert outputs == [oracle(PROMPT, seed, 50) for seed in range(40)]
        assert len(server.peers) == 1
        ids = [key for message, key in server.peers[0].heard if isinstance(message, Generate)]
        assert len(set(ids)) == 40
        assert server.peers[0].reads == 2  # HELLO, and all the requests


async def test_a_seed_is_drawn_where_one_matters(path: Path) -> None:
    async with Server(path, serve) as server, AsyncClient(path) as client:
        results = [await client.complete(PROMPT, max_tokens=1, temperature=t) for t in (0.0, 1.0, 1.0)]
        sent = [message.seed for message, _ in server.peers[0].heard if isinstance(message, Generate)]
        assert sent[0] is None
        assert None not in sent[1:]
        assert sent[1] != sent[2]
        assert [r.seed for r in results[1:]] == sent[1:]


# ---- ends ----


async def test_cancel_gives_abort_and_what_has_come(path: Path) -> None:
    async with Server(path, never_done), AsyncClient(path) as client:
        stream = client.generate(PROMPT)
        tokens = []
        async for token in stream:
            tokens.append(token)
            if token.index == 9:
                stream.cancel()
        assert tokens == list(range(10))
        assert stream.result.finish_reason == "abort"
        assert stream.result.usage.generated == 10


async def leave_by_break(client: AsyncClient) -> None:
    async for token in client.generate(PROMPT):
        if token.index == 3:
            break


async def leave_by_exception(client: AsyncClient) -> None:
    async def read() -> None:
        async for token in client.generate(PROMPT):
            1 // (3 - token.index)

    with pytest.raises(ZeroDivisionError):
        await read()


async def leave_the_block(client: AsyncClient) -> None:
    async with client.generate(PROMPT) as stream:
        await anext(stream)
    assert [token async for token in stream] == []
    assert stream.result.finish_reason == "abort"
    client.kept = stream  # type: ignore[attr-defined]


async def leave_by_closing(client: AsyncClient) -> None:
    stream = client.generate(PROMPT)
    stream.close()
    stream.close()
    assert [token async for token in stream] == []


async def leave_as_garbage(client: AsyncClient) -> None:
    cycle: list[object] = [client.generate(PROMPT)]
    cycle.append(cycle)
    del cycle
    gc.collect()


async def leave_by_cancelling_the_task(client: AsyncClient) -> None:
    stream = client.generate(PROMPT)

    async def read() -> None:
        async for _ in stream:
            pass

    task = asyncio.ensure_future(read())
    await until(lambda: len(stream.tokens) == 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    client.kept = stream  # type: ignore[attr-defined]


async def leave_a_completion(client: AsyncClient) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.complete(PROMPT), 0.05)


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_exception, leave_the_block, leave_by_closing,
                                   leave_as_garbage, leave_by_cancelling_the_task, leave_a_completion])
async def test_leaving_early_cancels(path: Path, leave: object) -> None:
    async with Server(path, never_done) as server, AsyncClient(path) as client:
        await leave(client)  # type: ignore[operator]
        peer = server.peers[0]
        await until(lambda: peer.count(Cancel) == 1)
        assert not peer.connection.live
        assert peer.heard[-1][1] == peer.heard[-2][1]  # of that request
        await leave_by_break(client)  # the connection lives on
        assert len(server.peers) == 1


async def test_closing_the_client_ends_streams_and_says_so(path: Path) -> None:
    async with Server(path, never_done) as server:
        client = AsyncClient(path)
        await client.connect()
        stream = client.generate(PROMPT)
        await until(lambda: stream.tokens)
        waiter = asyncio.ensure_future(client.complete(PROMPT))
        await until(lambda: server.peers[0].count(Generate) == 2)
        await client.close()
        await client.close()
        with pytest.raises(errors.ClientClosed):
            await waiter
        assert [await anext(stream) for _ in range(10)] == list(range(10))
        with pytest.raises(errors.ClientClosed):
            await anext(stream)
        with pytest.raises(errors.ClientClosed):
            client.generate(PROMPT)
        with pytest.raises(errors.ClientClosed):
            await client.health()
        assert server.peers[0].count(Bye) == 0  # which would let the output run on


async def test_one_reader_at_a_time(path: Path) -> None:
    async def silent(peer: Peer) -> None:
        await peer.welcome()
        await peer.expect_gone()

    async with Server(path, silent), AsyncClient(path) as client:
        stream = client.generate(PROMPT)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(errors.ColibriError, match="another task"):
            await anext(stream)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first


# ---- flow control ----


async def test_a_reader_that_stops_stops_the_server(path: Path) -> None:
    limits = LimitInfo(frame=1 << 20, requests=64, credit=64)
    async with Server(path, partial(serve, limits=limits)) as server, AsyncClient(path) as client:
        slow, other = client.generate(PROMPT, max_tokens=1000, seed=1), client.generate(PROMPT, max_tokens=1000, seed=2)
        assert await anext(slow) == oracle(PROMPT, 1, 1)[0]
        assert [t async for t in other] == oracle(PROMPT, 2, 1000)  # is not held up
        assert len(slow.tokens) == 64
        taken = [await anext(slow) for _ in range(40)]
        await until(lambda: len(slow.tokens) > 64)
        rest = [token async for token in slow]
        assert [oracle(PROMPT, 1, 1)[0], *taken, *rest] == oracle(PROMPT, 1, 1000)
        granted = sum(m.tokens for m, key in server.peers[0].heard if isinstance(m, Credit) and key == 1)
        assert 1000 - 64 <= granted <= 1000


async def test_a_completion_asks_for_all_its_credit_at_once(path: Path) -> None:
    async with Server(path, serve) as server, AsyncClient(path) as client:
        assert (await client.complete(PROMPT, max_tokens=3000)).tokens == oracle(PROMPT, 0, 3000)
        assert [m.tokens for m, _ in server.peers[0].heard if isinstance(m, Credit)] == [3000 - 1024]
        assert server.peers[0].reads == 2


async def test_without_the_feature_there_is_no_credit(path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome(credit=False)
        _, key = await peer.expect(Generate)
        for index in range(2000):
            peer.tokens(key, [1], index)
        peer.done(key, 2000)
        await peer.expect(Bye)

    async with Server(path, script), AsyncClient(path) as client:
        assert [t async for t in client.generate(PROMPT, max_tokens=2000)] == [1] * 2000


async def test_requests_above_the_limit_wait_for_room(path: Path) -> None:
    limits = LimitInfo(frame=LIMITS.frame, requests=3)
    most = 0

    async def script(peer: Peer) -> None:
        nonlocal most
        await peer.welcome(limits=limits)
        while True:
            message, key = await peer.next()
            if isinstance(message, Generate):
                most = max(most, len(peer.connection.live))
                asyncio.get_running_loop().call_later(0.005, peer.done, key)

    async with Server(path, script), AsyncClient(path) as client:
        results = await asyncio.gather(*(client.complete(PROMPT) for _ in range(20)))
    assert [r.finish_reason for r in results] == ["length"] * 20
    assert most == 3


async def test_resume_given_by_the_caller_is_part_of_the_output(path: Path) -> None:
    whole = oracle(PROMPT, 5, 10)
    async with Server(path, serve), AsyncClient(path) as client:
        stream = client.generate(PROMPT, max_tokens=10, seed=5, resume={"tokens": whole[:4], "seed": 5})
        tokens = [token async for token in stream]
    assert [t.index for t in tokens] == list(range(4, 10))
    assert tokens == whole[4:]
    assert stream.result.tokens == whole
    assert unpack(pack(whole)) == whole
