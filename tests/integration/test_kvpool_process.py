"""The KV pool in the real daemon: its own death and others', in the middle of everything. Nothing may fail, no token
may be wrong, no slab may be lost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from colibri_client import AsyncClient, Client
from colibri_engine import Engine
from fixtures.daemon import Daemon
from fixtures.models import Models

KILLS = 8
STREAMS = 6  # at once
ATTENTION = {"pinned": 128, "window": 384}  # the model's own, which was trained at 512


@dataclass(frozen=True)
class Ask:
    """A request and the only right answer to it."""

    prompt: list[int]
    options: dict[str, Any]
    tokens: list[int]


@pytest.fixture(scope="module")
def model(models: Models) -> Path:
    return models.tiny("q4")


@pytest.fixture(scope="module")
def asks(model: Path) -> list[Ask]:
    """Several with a common beginning, lengths on and beside the boundaries of slabs; some go on past the window."""
    draw = random.Random(4)
    system = [draw.randrange(3, 300) for _ in range(128)]
    made = []
    with Engine.open(model) as engine:
        for n, (tail, length) in enumerate([(0, 20), (1, 64), (63, 65), (64, 200), (200, 90), (30, 420)]):
            prompt = system + [draw.randrange(3, 300) for _ in range(tail)]
            options = {"temperature": 0.9, "seed": n}
            tokens = engine.generate(prompt, length, **options, **ATTENTION)
            made.append(Ask(prompt, options | {"max_tokens": length, "ignore_eos": True}, list(tokens)))
    return made


@pytest.fixture
def daemon(model: Path):
    with Daemon(model, workers=2, threads=1, slab_tokens=16) as daemon:
        yield daemon


class Load:
    """Streams without end. done: requests that ended well; a wrong or failed one ends the test."""

    def __init__(self, client: AsyncClient, asks: list[Ask]) -> None:
        self._client, self._asks, self._stopped = client, asks, False
        self.done = 0

    async def stream(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._stopped:
            ask = draw.choice(self._asks)
            found = await self._client.complete(ask.prompt, **ask.options)
            assert list(found.tokens) == ask.tokens
            self.done += 1

    def stop(self) -> None:
        self._stopped = True


@asynccontextmanager
async def load(daemon: Daemon, asks: list[Ask]) -> AsyncIterator[Load]:
    async with AsyncClient(daemon.socket, retries=0) as client:
        running = Load(client, asks)
        streams = [asyncio.create_task(running.stream(seed)) for seed in range(STREAMS)]
        try:
            yield running
        finally:
            running.stop()
            await asyncio.gather(*streams)


async def until(condition: Callable[[], Awaitable[Any]] | Callable[[], Any], daemon: Daemon) -> Any:
    """As Daemon.until(), while the streams go on."""
    return await asyncio.to_thread(daemon.until, condition)


def process(daemon: Daemon, role: str) -> int:
    """0 if there is none now."""
    return next((pid for pid, title in daemon.titles().items() if title == role), 0)


async def kill(daemon: Daemon, role: str, number: int = signal.SIGKILL) -> None:
    """Returns when another process has this role. Workers are killed when they work: five in a row that did not get to
    that would end the service."""
    await asyncio.to_thread(daemon.wait_ready)
    pid = await until(lambda: process(daemon, role), daemon)
    os.kill(pid, number)
    await until(lambda: process(daemon, role) not in (0, pid), daemon)


def slabs_at_rest(daemon: Daemon) -> bool:
    """No slab is held or lost; workers without work keep none."""
    with Client(daemon.socket) as client:
        stats = client.stats()
    slabs = stats.kv_slabs
    return not stats.running and slabs.get("total", 0) > 0 and slabs["free"] + slabs["cached"] == slabs["total"]


@pytest.mark.parametrize("kills", [KILLS, pytest.param(50, marks=pytest.mark.full)])
async def test_the_pool_is_killed_under_load(daemon, asks, kills):
    async with load(daemon, asks) as running:
        for _ in range(kills):
            seen = running.done
            await kill(daemon, "kvpool")
            await until(lambda seen=seen: running.done > seen, daemon)
    daemon.until(lambda: slabs_at_rest(daemon))
    assert len(daemon.log(msg="process ended", child="kvpool", how="by SIGKILL")) == kills
    assert daemon.log(msg="the pool has a process ended") == []
    assert [line for line in daemon.log(msg="process ended") if line["child"] != "kvpool"] == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("kills", [KILLS // 2, pytest.param(50, marks=pytest.mark.full)])
async def test_workers_are_killed_under_load(daemon, asks, number, kills):
    """By a signal that suspects nobody, and by one after which requests must have come on before the next, or they are
    taken for its cause."""
    draw, more = random.Random(int(number)), 3 * STREAMS if number == signal.SIGSEGV else 1
    async with load(daemon, asks) as running:
        for _ in range(kills):
            await kill(daemon, f"worker {draw.randrange(2)}", number)
            await asyncio.to_thread(daemon.wait_ready)
            seen = running.done
            await until(lambda seen=seen: running.done >= seen + more, daemon)
    daemon.wait_ready()
    daemon.until(lambda: slabs_at_rest(daemon))
    assert daemon.log(msg="the pool has a process ended") == []


async def test_deaths_while_memory_is_short(model, asks):
    """Requests are preempted all the time; each of them fits by itself."""
    draw = random.Random(2)
    with Daemon(model, workers=2, threads=1, slab_tokens=16, kv_bytes="1M") as daemon:
        async with load(daemon, asks) as running:
            for role in draw.choices(["kvpool", "worker 0", "worker 1"], k=KILLS // 2):
                seen = running.done
                await kill(daemon, role)
                await until(lambda seen=seen: running.done > seen, daemon)
        daemon.until(lambda: slabs_at_rest(daemon))
        with Client(daemon.socket) as client:
            assert client.stats().counters["num_preemptions_total"] > 0
        assert daemon.log(msg="the pool has a process ended") == []


async def test_the_pool_and_a_worker_die_together(daemon, asks):
    draw = random.Random(1)
    async with load(daemon, asks) as running:
        for _ in range(KILLS // 4):
            seen = running.done
            await asyncio.gather(kill(daemon, "kvpool"), kill(daemon, f"worker {draw.randrange(2)}"))
            await until(lambda seen=seen: running.done > seen, daemon)
    daemon.wait_ready()
    daemon.until(lambda: slabs_at_rest(daemon))
    assert daemon.log(msg="the pool has a process ended") == []


async def test_the_dispatcher_dies_with_all_its_requests(daemon, asks):
    """Their slabs do not stay behind, in the workers or in the pool."""
    async with AsyncClient(daemon.socket, retries=0) as client:
        streams = [asyncio.create_task(client.complete(ask.prompt, **ask.options | {"max_tokens": 5000}))
                   for ask in asks]
        await until(lambda: any(daemon.health().workers) and process(daemon, "dispatcher"), daemon)
        await kill(daemon, "dispatcher")
        for stream in streams:
            with suppress(Exception):
                await stream
    daemon.wait_ready()
    daemon.until(lambda: slabs_at_rest(daemon))


async def test_prefixes_outlive_the_pool(daemon, asks):
    ask = asks[3]

    async def cached() -> int:
        async with AsyncClient(daemon.socket) as client:
            found = await client.complete(ask.prompt, **ask.options)
            assert list(found.tokens) == ask.tokens
            return found.usage.cached

    assert await cached() == 0
    most = (len(ask.prompt) - 1) // 16 * 16
    assert await cached() == most
    await kill(daemon, "kvpool")
    assert await cached() == most


def memories(pids: set[int]) -> dict[int, set[str]]:
    """pid → the KV memory it has mapped or open."""
    found: dict[int, set[str]] = {}
    for pid in pids:
        with suppress(OSError):
            names = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
            names |= set(Path(f"/proc/{pid}/maps").read_text().split())
            found[pid] = {name for name in names if name.startswith("/memfd:colibri-kv")}
    return found


def everybody() -> set[int]:
    return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}


def test_no_memory_outlives_the_supervisor(model):
    with Daemon(model, workers=2, threads=1) as daemon:
        roles = daemon.titles()
        has = {roles[pid]: len(names) > 0 for pid, names in memories(daemon.pids()).items()}
        assert has == {"supervisor": True, "kvpool": True, "worker 0": True, "worker 1": True, "dispatcher": False}
        before = set(daemon.pids())
        daemon.kill()
        daemon.until(lambda: not daemon.pids())
        assert not any(memories(everybody() & before).values())


def test_what_the_operator_is_told_of_memory(model):
    with Daemon(model, workers=2, threads=1, kv_bytes="8M") as daemon:
        (line,) = daemon.log(msg="memory")
        assert line["kv_bytes"] == line["slabs"] * line["slab_bytes"] == 8 << 20
        assert line["chosen_by"] == "--kv-bytes"
        with Client(daemon.socket) as client:
            assert client.stats().kv_slabs["total"] == line["slabs"]
