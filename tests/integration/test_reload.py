"""The real daemon reloads: SIGHUP under load, with other settings, other models, bad ones, and as for an upgrade."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from colibri_client import AsyncClient, Client
from colibri_client.admin import Admin
from colibri_daemon.common.exit_codes import Exit
from fixtures.daemon import Daemon
from fixtures.models import Models

LENGTH = 400  # tokens of a stream
LONG = 2000  # of one that is not read: it waits for credit before its end
PROMPTS = [[n, n + 1, n + 2] for n in range(1, 9)]


@pytest.fixture(scope="module")
def q4(models: Models) -> Path:
    return models.tiny("q4")


@pytest.fixture(scope="module")
def q8(models: Models) -> Path:
    return models.tiny("q8")


def expected(model: Path, prompts: list[list[int]], length: int) -> list[list[int]]:
    """What the model says, undisturbed."""
    with Daemon(model, threads=1) as daemon, Client(daemon.socket) as client:
        return [list(client.complete(prompt, max_tokens=length, ignore_eos=True).tokens) for prompt in prompts]


@pytest.fixture(scope="module")
def texts(q4: Path) -> list[list[int]]:
    return expected(q4, PROMPTS, LENGTH)


class Service(Daemon):
    """With its settings in a file that a reload reads again."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.file = folder / "colibrid.toml"
        self.configure(**settings)
        super().__init__(None, config=self.file)

    def configure(self, **settings: object) -> None:
        self.file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))

    def outcomes(self) -> list[str]:
        """Why each reload failed, nothing for those that did not."""
        lines = [line for line in self.log(name="reload") if line["msg"].startswith(("reload done", "reload failed"))]
        return [line.get("reason", "") for line in lines]

    def reload(self) -> str:
        """By SIGHUP; until it has ended."""
        before = len(self.outcomes())
        self.signal(signal.SIGHUP)
        return self.until(lambda: self.outcomes()[before:])[0]

    def gone(self, generation: int) -> None:
        self.until(lambda: self.log(msg="generation gone", generation=generation))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[type[Service]]:
    """Makes the one service of a test, which is stopped in good order at its end."""
    with contextlib.ExitStack() as stack:

        def make(model: Path, **settings: object) -> Service:
            return stack.enter_context(Service(tmp_path, **{"model": str(model), "threads": 1, **settings}))

        yield make


async def keep_asking(daemon: Daemon, number: int, stop: asyncio.Event) -> list[list[int]]:
    """A client with one connection: the same request again and again. What came each time."""
    found = []
    async with AsyncClient(daemon.socket) as client:
        while not (stop.is_set() and found):
            stream = client.generate(PROMPTS[number], max_tokens=LENGTH, ignore_eos=True)
            found.append([token async for token in stream])
    return found


@contextlib.asynccontextmanager
async def load(daemon: Daemon, texts: list[list[int]]) -> AsyncIterator[None]:
    """Eight clients, each with a request that runs at any time; no request fails, no token differs."""
    stop = asyncio.Event()
    clients = [asyncio.create_task(keep_asking(daemon, number, stop)) for number in range(len(PROMPTS))]
    try:
        yield
    finally:
        stop.set()
        results = await asyncio.gather(*clients)
    for number, found in enumerate(results):
        assert all(tokens == texts[number] for tokens in found)


async def reloaded(daemon: Service) -> None:
    assert await asyncio.to_thread(daemon.reload) == ""


async def test_under_load_with_the_same_configuration(serve, q4, texts):
    """New processes, nothing else: every stream goes on with the same tokens on the same connection."""
    daemon = serve(q4, workers=2)
    before = daemon.pid_of("dispatcher"), daemon.pid_of("kvpool")
    async with load(daemon, texts):
        for _ in range(4):
            await reloaded(daemon)
    daemon.gone(4)
    assert (daemon.pid_of("dispatcher"), daemon.pid_of("kvpool")) == before
    assert sorted(daemon.titles().values()) == ["dispatcher", "kvpool", "supervisor", "worker 0", "worker 1"]
    assert daemon.log(level="error") == []


async def test_under_load_with_other_settings(serve, q4, texts):
    daemon = serve(q4, workers=1, max_seqs=4)
    async with load(daemon, texts):
        for settings in ({"workers": 3}, {"max_seqs": 2, "workers": 2}, {"kv_eviction": "lfu"}, {"kv_bytes": "32M"}):
            daemon.configure(model=str(q4), threads=1, **settings)
            await reloaded(daemon)
    health = daemon.until(lambda: (health := daemon.health()).state == "ready" and health)
    assert len(health.workers) == 1
    daemon.until(lambda: len(daemon.pids()) == 4)


async def test_another_model(serve, q4, q8):
    """Who began with the old one ends with it; who comes later gets the new one."""
    (old,), (new,) = expected(q4, PROMPTS[:1], LONG), expected(q8, PROMPTS[:1], LONG)
    assert old != new
    daemon = serve(q4)
    async with AsyncClient(daemon.socket) as client:
        stream = client.generate(PROMPTS[0], max_tokens=LONG, ignore_eos=True)
        begun = [await anext(stream)]  # it cannot end while nobody reads
        daemon.configure(model=str(q8), threads=1)
        await reloaded(daemon)
        later = await client.complete(PROMPTS[0], max_tokens=LONG, ignore_eos=True)
        assert list(later.tokens) == new
        assert sorted(daemon.titles().values()).count("kvpool") == 2
        assert [*begun, *[token async for token in stream]] == old
    daemon.gone(1)
    daemon.until(lambda: sorted(daemon.titles().values()) == ["dispatcher", "kvpool", "supervisor", "worker 0"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workers": 0}, "workers = 0: must be"),
        ({"model": "/nowhere"}, "/nowhere"),
        ({"socket_mode": "0600"}, "socket_mode cannot be changed"),
        ({"nonsense": 1}, 'unknown key "nonsense"'),
    ],
)
async def test_a_bad_configuration_changes_nothing(serve, q4, texts, settings, words):
    daemon = serve(q4)
    before = daemon.pids()
    async with load(daemon, texts):
        daemon.configure(**{"model": str(q4), "threads": 1} | settings)
        assert words in await asyncio.to_thread(daemon.reload)
    daemon.until(lambda: daemon.pids() == before)
    assert (daemon.health().state, daemon.health().ready, daemon.health().reason) == ("ready", True, "")
    daemon.configure(model=str(q4), threads=1)
    assert daemon.reload() == ""


async def test_a_generation_that_cannot_have_its_memory(serve, q4, texts):
    daemon = serve(q4)
    async with load(daemon, texts):
        daemon.configure(model=str(q4), threads=1, kv_bytes="64T")
        assert "lower kv_bytes" in await asyncio.to_thread(daemon.reload)


async def test_everything(serve, q4, texts):
    """As for a package upgrade: another dispatcher behind the same socket; streams end on the old one."""
    (text,) = expected(q4, PROMPTS[:1], LONG)
    daemon = serve(q4, workers=2)
    old = daemon.pids()
    async with AsyncClient(daemon.socket) as client, load(daemon, texts):
        stream = client.generate(PROMPTS[0], max_tokens=LONG, ignore_eos=True)
        begun = [await anext(stream)]
        await asyncio.to_thread(reload_everything, daemon)
        titles = list(daemon.titles().values())
        assert (titles.count("dispatcher"), titles.count("kvpool")) == (2, 2)
        assert [*begun, *[token async for token in stream]] == text
    daemon.gone(1)
    daemon.until(lambda: len(daemon.pids()) == 5)
    assert daemon.pids() & old == {daemon.process.pid}
    assert daemon.health().state == "ready"


def reload_everything(daemon: Service) -> None:
    with Admin(f"{daemon.socket}.admin") as admin:
        admin.reload(everything=True)


def test_a_stop_in_the_middle(serve, q4):
    daemon = serve(q4, workers=2)
    daemon.signal(signal.SIGHUP)
    daemon.until(lambda: daemon.log(msg="reload", stage="loading"))
    assert daemon.stop() == Exit.STOPPED
    assert daemon.pids() == set()
    assert daemon.outcomes() == ["the daemon is stopping"]


async def test_a_worker_of_the_coming_generation_is_killed(serve, q4, texts):
    daemon = serve(q4)
    old = daemon.pid_of("worker 0")
    async with load(daemon, texts):
        daemon.signal(signal.SIGHUP)
        new = await asyncio.to_thread(daemon.until, lambda: next(
            (pid for pid, title in daemon.titles().items() if title == "worker 0" and pid != old), 0))  # fmt: skip
        os.kill(new, signal.SIGKILL)
        await asyncio.to_thread(daemon.until, daemon.outcomes)
    assert daemon.outcomes() == [""]


def test_connections_stay_open(serve, q4):
    """An idle one sees nothing of a reload but what is new."""
    daemon = serve(q4)
    with Client(daemon.socket) as client:
        for _ in range(2):
            assert daemon.reload() == ""
            assert len(client.complete(PROMPTS[0], max_tokens=4, ignore_eos=True).tokens) == 4


def test_a_listening_socket_is_never_missing(serve, q4):
    daemon = serve(q4)
    daemon.signal(signal.SIGHUP)
    while not daemon.outcomes():
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(daemon.socket))
    assert daemon.outcomes() == [""]
