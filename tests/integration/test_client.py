"""The Python client with the real daemon: what a user of the library relies on."""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from colibri_client import AsyncClient, Client, errors
from fixtures.daemon import Daemon
from fixtures.models import Models

PROMPT = [5, 6, 7, 8]
SAMPLED: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def daemon(models: Models) -> Iterator[Daemon]:
    with Daemon(models.tiny("q4"), workers=1, threads=1) as daemon:
        yield daemon


@asynccontextmanager
async def cutting(target: Path, *lengths: int) -> AsyncIterator[Path]:
    """A socket in front of another one: connection i ends after lengths[i] bytes from the server, later ones do not."""
    left, tasks = list(lengths), []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: float = float("inf")) -> None:
        with suppress(ConnectionError):
            while most > 0 and (data := await reader.read(int(min(most, 1 << 16)))):
                most -= len(data)
                writer.write(data)
                await writer.drain()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        inner_reader, inner_writer = await asyncio.open_unix_connection(target)
        most = left.pop(0) if left else float("inf")
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer, most))

    with tempfile.TemporaryDirectory(prefix="colibri-") as folder:
        path = Path(folder) / "s"
        server = await asyncio.start_unix_server(accept, path)
        try:
            yield path
        finally:
            server.close()
            await asyncio.gather(*tasks)


def test_all_calls_of_the_blocking_client(daemon: Daemon) -> None:
    with Client(daemon.socket) as client:
        assert client.health().state == "ready"
        assert (client.model.name, client.limits.requests > 0) == ("tiny", True)
        stream = client.generate(PROMPT, logprobs=3, **SAMPLED)
        tokens = list(stream)
        assert len(tokens) == 40
        assert all(len(t.top) == 3 and t.logprob is not None and t.logprob <= t.top[0][1] for t in tokens)
        assert (stream.result.finish_reason, stream.result.usage.generated) == ("length", 40)
        assert stream.result.receipt.seed == 11
        assert client.complete(PROMPT, **SAMPLED).tokens == tokens
        check = client.token_check(PROMPT, max_tokens=40)
        assert (check.prompt_tokens, check.max_tokens) == (4, 40)
        assert client.stats().counters["generation_tokens_total"] >= 80
        assert client.ping() > 0


def test_a_drawn_seed_gives_the_same_again(daemon: Daemon) -> None:
    with Client(daemon.socket) as client:
        first = client.complete(PROMPT, max_tokens=30, temperature=1.5, ignore_eos=True)
        again = client.complete(PROMPT, max_tokens=30, temperature=1.5, ignore_eos=True, seed=first.seed)
        assert (again.tokens, again.receipt) == (first.tokens, first.receipt)


def test_scores_are_the_log_probabilities_of_the_prompt(daemon: Daemon) -> None:
    with Client(daemon.socket) as client:
        text = PROMPT + client.complete(PROMPT, max_tokens=8, ignore_eos=True).tokens
        scores = client.score(text, top=2)
        result = client.complete(text, max_tokens=1, prompt_logprobs=2)
        assert len(scores) == len(text) - 1
        assert (list(scores), scores.top) == (list(result.prompt_scores), result.prompt_scores.top)
        assert list(client.score(text, start=5)) == scores[4:]
        assert scores.top[-1][0] == (text[-1], scores[-1])  # greedy output is the best alternative


def test_errors_of_the_daemon(daemon: Daemon) -> None:
    with Client(daemon.socket) as client:
        vocab = client.model.vocab_size
        with pytest.raises(errors.TokenOutOfRange) as raised:
            client.complete([1, vocab])
        assert (raised.value.field, raised.value.index) == ("tokens", 1)
        with pytest.raises(errors.PromptTooLong) as raised:
            client.complete([1] * client.model.max_len)
        assert raised.value.limit == client.model.max_len - 1
        with pytest.raises(errors.ModelMismatch):
            client.complete(PROMPT, model="another")
        assert client.complete(PROMPT, max_tokens=1).finish_reason in ("length", "stop")


async def test_resumed_by_hand_after_each_token(daemon: Daemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        whole = (await client.complete(PROMPT, **SAMPLED)).tokens
        stop = {**SAMPLED, "stop_ids": [whole[12]], "presence_penalty": 0.0}
        stopped = await client.complete(PROMPT, **stop)
        length = stopped.usage.generated
        assert (stopped.finish_reason, stopped.tokens) == ("stop", whole[:length])
        for at in range(1, length + 1):
            again = await client.complete(PROMPT, resume={"tokens": whole[:at], "seed": 11}, **stop)
            assert (again.tokens, again.finish_reason, again.stop_match) == (stopped.tokens, "stop", stopped.stop_match)
            assert again.usage.generated == length


async def test_a_connection_that_breaks_anywhere(daemon: Daemon) -> None:
    """After any number of bytes, in the middle of frames too: the same streams."""
    rng = random.Random(5)
    async with AsyncClient(daemon.socket) as client:
        expected = [(await client.complete(PROMPT, **SAMPLED | {"seed": seed})).tokens for seed in range(3)]
        welcome = 500  # bytes; the handshake itself is not cut here
    for _ in range(12):
        cuts = [welcome + rng.randrange(2500) for _ in range(3)]
        async with cutting(daemon.socket, *cuts) as path, AsyncClient(path) as client:
            async def read(seed: int) -> list[int]:
                return [t async for t in client.generate(PROMPT, **SAMPLED | {"seed": seed})]  # noqa: B023

            assert await asyncio.gather(*(read(seed) for seed in range(3))) == expected


async def test_leaving_frees_the_worker(daemon: Daemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        for _ in range(3):
            async for token in client.generate(PROMPT, max_tokens=100_000, ignore_eos=True):
                if token.index == 5:
                    break
        stream = client.generate(PROMPT, max_tokens=100_000, ignore_eos=True)
        async for token in stream:
            if token.index == 5:
                stream.cancel()
        assert stream.result.finish_reason == "abort"
        async with asyncio.timeout(20):
            while (await client.stats()).running:
                await asyncio.sleep(0.01)


async def test_a_reader_that_stops_is_waited_for(daemon: Daemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        slow = client.generate(PROMPT, **SAMPLED | {"max_tokens": 3000})
        await anext(slow)
        other = await client.complete(PROMPT, **SAMPLED | {"max_tokens": 3000})
        assert len(slow.tokens) <= client.limits.credit
        assert [token async for token in slow] == other.tokens[1:]


async def test_timeouts_on_either_side(daemon: Daemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        with pytest.raises(errors.TimeoutExceeded) as raised:
            await client.complete(PROMPT, max_tokens=100_000, ignore_eos=True, timeout=0.3)
        assert raised.value.tokens
        late = await client.complete(PROMPT, max_tokens=100_000, ignore_eos=True, deadline_ms=300)
        assert late.finish_reason == "deadline"
        assert late.tokens


def test_stopping_the_daemon(models: Models) -> None:
    """Live streams are told; the client says where there is no daemon any more."""
    with Daemon(models.tiny("q4"), workers=1, threads=1, drain_seconds=0) as daemon:
        with Client(daemon.socket, reconnect=0.2) as client:
            stream = client.generate(PROMPT, max_tokens=100_000, ignore_eos=True)
            next(stream)
            daemon.signal(signal.SIGTERM)
            with pytest.raises((errors.Draining, errors.ConnectionLost)):
                list(stream)
            with pytest.raises((errors.ConnectionFailed, errors.Draining)):
                client.health()
        assert daemon.ended() == 0
        with pytest.raises(errors.ConnectionFailed, match="is the daemon running"):
            Client(daemon.socket)
