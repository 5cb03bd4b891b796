"""Shared prefixes through the real daemon: what is reused, by whom, and that no bit changes with it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from colibri_client import AsyncClient, Client, Completion, errors
from colibri_engine import Engine
from fixtures.daemon import Daemon
from fixtures.models import Models

PINNED, WINDOW, BLOCK, VOCAB = 128, 384, 64, 2048  # of the tiny model, as the daemon uses it


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


@pytest.fixture(scope="module")
def engine(models: Models) -> Iterator[Engine]:
    with Engine.open(models.tiny("q4")) as opened:
        yield opened


@pytest.fixture(scope="module")
def daemon(models: Models) -> Iterator[Daemon]:
    with Daemon(models.tiny("q4"), workers=2, threads=1, trusted_uids="0") as running:
        yield running


def expected(engine: Engine, prompt: list[int], count: int, **sampling: Any) -> list[int]:
    return engine.generate(prompt, count, pinned=PINNED, window=WINDOW, **sampling)


def run(client: Client, prompt: list[int], count: int = 8, **fields: Any) -> Completion:
    return client.complete(prompt, max_tokens=count, ignore_eos=True, **fields)


def settled(client: Client, **slabs: float) -> None:
    """Waits until the slabs in these states are as many."""
    deadline = time.monotonic() + 30
    while (found := client.stats().kv_slabs).items() & slabs.items() != slabs.items():
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 2 * BLOCK, 400, PINNED + WINDOW + 1, 3 * (PINNED + WINDOW)])
def test_the_second_time_is_a_hit(daemon: Daemon, engine: Engine, length: int) -> None:
    prompt = text(length, length)
    with Client(daemon.socket) as client:
        cold, warm = run(client, prompt), run(client, prompt)
    assert cold.usage.cached == 0
    assert warm.usage.cached == (length - 1) // BLOCK * BLOCK
    assert cold.tokens == warm.tokens == expected(engine, prompt, 8)


def test_a_second_turn_reuses_the_first_answer(daemon: Daemon, engine: Engine) -> None:
    prompt = text(7, 100)
    with Client(daemon.socket) as client:
        first = run(client, prompt, 100)
        longer = prompt + first.tokens + text(8, 30)
        second = run(client, longer)
    assert second.usage.cached == (len(prompt) + len(first.tokens) - 1) // BLOCK * BLOCK
    assert second.tokens == expected(engine, longer, 8)


def test_token_check_tells_what_is_cached(daemon: Daemon) -> None:
    prompt = text(11, 200)
    with Client(daemon.socket) as client:
        assert client.token_check(prompt).cached_tokens == 0
        run(client, prompt)
        assert client.token_check(prompt).cached_tokens == 192
        assert client.token_check(prompt, cache={"salt_extra": b"x"}).cached_tokens == 0


@pytest.mark.parametrize(
    ("seed", "first", "second"),
    [
        (501, {"cache": {"use": False}}, {}),
        (502, {}, {"cache": {"use": False}}),
        (503, {"cache": {"salt_extra": b"a"}}, {"cache": {"salt_extra": b"b"}}),
        (504, {"tenant": "a"}, {"tenant": "b"}),
        (505, {"tenant": "a"}, {}),
    ],
)
def test_who_does_not_share(daemon: Daemon, engine: Engine, seed: int, first: Any, second: Any) -> None:
    prompt = text(seed, 300)
    with Client(daemon.socket) as client:
        run(client, prompt, **first)
        other = run(client, prompt, **second)
    assert other.usage.cached == 0
    assert other.tokens == expected(engine, prompt, 8)


def test_prompt_scores_are_computed_not_cached(daemon: Daemon, engine: Engine) -> None:
    prompt = text(13, 200)
    with Client(daemon.socket) as client:
        run(client, prompt)
        assert list(client.score(prompt)) == engine.logprobs(prompt, PINNED, WINDOW).tolist()


async def test_many_at_once_compute_a_prompt_once(models: Models, engine: Engine) -> None:
    """32 requests for one system prompt in one turn of the loop: 31 wait for the slabs of the first."""
    system, tails = text(17, 448), [text(100 + i, 10) for i in range(32)]
    with Daemon(models.tiny("q4"), workers=2, threads=1) as daemon:
        async with AsyncClient(daemon.socket) as client:
            answers = await asyncio.gather(
                *(client.complete(system + tail, max_tokens=4, ignore_eos=True) for tail in tails))
            stats = await client.stats()
        with Client(daemon.socket) as client:
            settled(client, live=0, cached=len(system) // BLOCK)  # one copy; the tails fill no slab
    computed = sum(worker["rows"] for worker in stats.workers)
    assert computed <= len(system) + 32 * (10 + 4)
    assert [a.tokens for a in answers] == [expected(engine, system + tail, 4) for tail in tails]
    assert sorted(a.usage.cached for a in answers) == [0] + [448] * 31


@pytest.mark.parametrize("requests", [400, pytest.param(2000, marks=pytest.mark.full)])
async def test_no_marker_ever_crosses(models: Models, engine: Engine, requests: int) -> None:
    """Sessions of many tenants with the same system prompt and a marker of their own, a tenth of them aborted."""
    rng, system = random.Random(3), text(19, 200)
    prompts = [system + [3 + i] * 8 + text(200 + i, 60) for i in range(64)]
    truth = [expected(engine, prompt, 12) for prompt in prompts]
    slots = asyncio.Semaphore(64)

    async def one(client: AsyncClient, session: int) -> None:
        async with slots:
            stream = client.generate(prompts[session], max_tokens=12, ignore_eos=True, tenant=f"t{session % 7}")
            heard: list[int] = []
            stop_at = rng.randrange(1, 12) if rng.random() < 0.1 else 99
            async with stream:
                async for token in stream:
                    heard.append(int(token))
                    if len(heard) == stop_at:
                        break
            assert heard == truth[session][: len(heard)]
            assert len(heard) == min(stop_at, 12)

    with Daemon(models.tiny("q4"), workers=2, threads=1, trusted_uids="0", kv_bytes="24M") as daemon:
        async with AsyncClient(daemon.socket) as client:
            await asyncio.gather(*(one(client, rng.randrange(64)) for _ in range(requests)))
            stats = await client.stats()
    assert not stats.counters.get('prefix_cache_rejects_total{reason="token_mismatch"}')
    assert stats.counters["prefix_cache_hits_total"] > 0


async def test_a_thousand_cancels_leave_nothing(models: Models) -> None:
    rng = random.Random(5)
    with Daemon(models.tiny("q4"), workers=2, threads=1, queue_requests=2000, requests_per_connection=1000,
                queue_tokens=10_000_000) as daemon:
        async with AsyncClient(daemon.socket) as client:
            streams = [client.generate(text(i, 50 + i % 300), max_tokens=1000, ignore_eos=True) for i in range(1000)]
            await anext(aiter(streams[0]))
            rng.shuffle(streams)
            for stream in streams:
                stream.cancel()
            for stream in streams:
                with suppress(errors.ColibriError):
                    async for _ in stream:
                        pass
            deadline = time.monotonic() + 30
            while (found := (await client.stats()).kv_slabs)["live"]:
                assert time.monotonic() < deadline, found
                await asyncio.sleep(0.01)


async def test_pressure_preempts_and_changes_no_token(models: Models, engine: Engine) -> None:
    """Room for a few long requests only, while many run."""
    prompts = [text(300 + i, 120) for i in range(16)]
    slab = engine.info.slab_bytes
    with Daemon(models.tiny("q4"), workers=2, threads=1, kv_bytes=24 * slab) as daemon:
        async with AsyncClient(daemon.socket) as client:
            answers = await asyncio.gather(
                *(client.complete(p, max_tokens=250, ignore_eos=True, seed=9, temperature=0.9) for p in prompts))
            stats = await client.stats()
    assert [a.tokens for a in answers] == [expected(engine, p, 250, seed=9, temperature=0.9) for p in prompts]
    assert stats.counters["num_preemptions_total"] > 0


def test_what_can_never_fit(models: Models, engine: Engine) -> None:
    with (
        Daemon(models.tiny("q4"), kv_bytes=4 * engine.info.slab_bytes) as daemon,
        Client(daemon.socket) as client,
        pytest.raises(errors.NeverFits),
    ):
        run(client, text(1, 300))


def test_long_generation_holds_its_memory(models: Models, engine: Engine) -> None:
    """Four times past pinned prefix and window: never more slabs than those in view, and the engine's own tokens."""
    prompt, count = text(23, 40), 4 * (PINNED + WINDOW)
    most = 0.0
    with Daemon(models.tiny("q4"), threads=1) as daemon, Client(daemon.socket) as client:
        stream = client.generate(prompt, max_tokens=count, ignore_eos=True)
        heard = []
        for token in stream:
            heard.append(int(token))
            if len(heard) % 100 == 0:
                most = max(most, client.stats().kv_slabs["live"])
        settled(client, live=0)
    assert heard == expected(engine, prompt, count)
    assert 0 < most <= (PINNED + WINDOW) // BLOCK + 4
