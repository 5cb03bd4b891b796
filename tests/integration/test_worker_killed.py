"""A worker is killed from outside in the real daemon. Its streams go on without the supervisor, which is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from colibri_client import AsyncClient, Client
from fixtures.daemon import Daemon
from fixtures.models import Models

PROMPTS = [[number, 5, 6] * 40 for number in range(6)]
OPTIONS = {"max_tokens": 400, "temperature": 0.9, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(models: Models) -> Path:
    return models.tiny("q4")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def at_rest(daemon: Daemon) -> bool:
    with Client(daemon.socket) as client:
        slabs = client.stats().kv_slabs
    return bool(slabs["free"] + slabs["cached"] == slabs["total"])


async def test_streams_go_on_before_the_supervisor_has_looked(model: Path) -> None:
    with Daemon(model, workers=2, threads=1, slab_tokens=16) as daemon:
        async with AsyncClient(daemon.socket, retries=0) as client:
            right = [await client.complete(prompt, **OPTIONS) for prompt in PROMPTS]  # type: ignore[arg-type]
            begun = [asyncio.Event() for _ in PROMPTS]

            async def stream(number: int) -> list[int]:
                found = []
                async for token in client.generate(PROMPTS[number], **OPTIONS):  # type: ignore[arg-type]
                    found.append(int(token))
                    begun[number].set()
                return found

            streams = [asyncio.create_task(stream(number)) for number in range(len(PROMPTS))]
            for event in begun:
                await event.wait()
            victim = next(w for w in (await client.stats()).workers if w["running"])
            with stopped(daemon.process.pid):
                os.kill(int(victim["pid"]), signal.SIGKILL)
                assert await asyncio.gather(*streams) == [list(map(int, answer.tokens)) for answer in right]
                assert daemon.log(msg="process ended") == []
                (moved,) = daemon.log(msg="worker lost, its requests move")
        assert (moved["worker_pid"], moved["cause"]) == (victim["pid"], "killed")
        assert moved["requests"] >= 1
        daemon.wait_ready()
        daemon.until(lambda: at_rest(daemon))
        assert daemon.log(level="error", role="kvpool") == []
