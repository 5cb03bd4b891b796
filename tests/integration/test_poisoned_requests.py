"""Requests that end their workers, with real crashes: the test sends the signal while the victim is computed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from colibri_client import AsyncClient, Client, errors
from colibri_engine import Engine
from colibri_protocol.errors import Code
from fixtures.daemon import Daemon
from fixtures.models import Models

ATTENTION = {"pinned": 128, "window": 384}  # the tiny model's own
VICTIM = {"tokens": [7, 8, 9] * 10_000, "max_tokens": 5}  # whose prompt takes seconds
PATIENCE = 60.0
KILLS_MOST = 12


@pytest.fixture
def daemon(models: Models) -> Iterator[Daemon]:
    with Daemon(models.tiny("q4"), workers=1, threads=1, hang_seconds=2) as running:
        yield running


async def test_a_bad_request_ends_and_its_neighbours_lose_nothing(daemon: Daemon, models: Models) -> None:
    """All share the only worker when it dies first; then each is tried alone, and it dies of the victim again."""
    prompts = [[number, 5, 6] for number in range(3)]
    got: list[list[int]] = [[] for _ in prompts]

    async def neighbour(client: AsyncClient, number: int) -> None:
        options = {"max_tokens": 3000, "temperature": 0.9, "seed": number, "ignore_eos": True}
        async for token in client.generate(prompts[number], **options):  # type: ignore[arg-type]
            got[number].append(int(token))

    async def kill_until(victim: asyncio.Future[object], client: AsyncClient) -> int:
        """Kills each worker that computes the victim: beside all others, or alone and more than they would have to.
        How many that were."""
        killed: set[int] = set()
        while not victim.done() and len(killed) < KILLS_MOST:
            for worker in (await client.stats()).workers:
                together, alone = worker["running"] == len(prompts) + 1, worker["running"] == 1
                if worker["pid"] not in killed and (together or alone) and worker["rows"] > 1000:
                    os.kill(int(worker["pid"]), signal.SIGSEGV)
                    killed.add(int(worker["pid"]))
            await asyncio.sleep(0.001)
        return len(killed)

    async with AsyncClient(daemon.socket, retries=0) as client:
        neighbours = [asyncio.ensure_future(neighbour(client, number)) for number in range(len(prompts))]
        victim = asyncio.ensure_future(client.complete(**VICTIM))
        kills = await asyncio.wait_for(kill_until(victim, client), PATIENCE)
        with pytest.raises(errors.RequestError) as caught:
            await victim
        assert caught.value.code == Code.POISONED
        assert 2 <= kills <= KILLS_MOST
        await asyncio.gather(*neighbours)
        with pytest.raises(errors.RequestError) as caught:
            await client.complete(**VICTIM)
        assert caught.value.code == Code.POISONED
        assert (await client.complete([7, 8, 9], max_tokens=5)).tokens
        stats = await client.stats()
        assert stats.counters["poison_requests_total"] == 1
    with Engine.open(models.tiny("q4")) as engine:
        for number, prompt in enumerate(prompts):
            assert got[number] == engine.generate(prompt, 3000, temperature=0.9, seed=number, **ATTENTION)


def test_a_worker_that_stands_still_costs_its_request_only(daemon: Daemon) -> None:
    """Its deadline passes before the worker is judged to hang and another one takes over."""
    with Client(daemon.socket, retries=0) as client:
        stream = client.generate([5, 6, 7], max_tokens=100_000, ignore_eos=True, deadline_ms=1500)
        next(stream)
        os.kill(daemon.pid_of("worker 0"), signal.SIGSTOP)
        with pytest.raises(errors.RequestError) as caught:
            for _ in stream:
                pass
        assert caught.value.code == Code.WORKER_HUNG
        assert len(client.complete([5, 6, 7], max_tokens=20, ignore_eos=True).tokens) == 20
        assert client.stats().counters['request_errors_total{code="WORKER_HUNG"}'] == 1
