"""A worker that writes where it must not, and dies of that: the test does it in its stead, through the descriptor that
the worker has of the KV memory. What is damaged is found, thrown away and computed again."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from colibri_client import Client
from colibri_daemon.kvpool.server import SUSPECT_SECONDS
from colibri_engine import Engine
from fixtures.daemon import Daemon
from fixtures.models import Models

ATTENTION = {"pinned": 128, "window": 384}  # the tiny model's own
OPTIONS = {"max_tokens": 100_000, "temperature": 0.9, "seed": 6, "ignore_eos": True}
WORKERS = 2


@pytest.fixture(scope="module")
def model(models: Models) -> Path:
    return models.tiny("q4")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine.open(model) as opened:
        yield opened


@pytest.fixture
def daemon(model: Path) -> Iterator[Daemon]:
    with Daemon(model, workers=WORKERS, threads=1, slab_tokens=16, kv_bytes="16M") as running:
        yield running


def expected(engine: Engine, prompt: list[int], count: int) -> list[int]:
    return engine.generate(prompt, count, temperature=0.9, seed=6, **ATTENTION)


def arena_of(pid: int) -> Path:
    """The process's way to the KV memory."""
    return next(entry for entry in Path(f"/proc/{pid}/fd").iterdir()
                if os.readlink(entry).removesuffix(" (deleted)") == "/memfd:colibri-kv")  # fmt: skip


def scribble(pid: int) -> None:
    """Over all slabs: free, committed and half written."""
    with arena_of(pid).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:] = random.Random(pid).randbytes(len(memory))


def are_asleep(client: Client, pids: list[int]) -> bool:
    """Whether all have waited for something to do, and done nothing, for so long that what they have committed is older
    than what a fault makes suspect. One that was only not given the CPU is runnable; an idle one wakes up now and then,
    but does not count a step."""
    done = progress(client)
    end = time.monotonic() + SUSPECT_SECONDS
    while time.monotonic() < end:
        if any(state(pid) != "S" for pid in pids):
            return False
        time.sleep(0.02)
    return progress(client) == done


def progress(client: Client) -> list[tuple[float, float]]:
    return [(worker["steps"], worker["rows"]) for worker in client.stats().workers]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_worker_writes_over_everything_and_dies_of_it(daemon: Daemon, engine: Engine) -> None:
    """While nobody computes: what is made of damage before it is known cannot be right."""
    workers = [daemon.pid_of(f"worker {slot}") for slot in range(WORKERS)]
    draw = random.Random(5)
    system = [draw.randrange(3, 300) for _ in range(128)]
    prompts = [system + [draw.randrange(3, 300) for _ in range(tail)] for tail in (7, 190)]
    with Client(daemon.socket, retries=0) as client, ExitStack() as stack:
        streams = [stack.enter_context(client.generate(prompt, **OPTIONS)) for prompt in prompts]
        daemon.until(lambda: all(len(stream.tokens) == client.limits.credit for stream in streams))
        daemon.until(lambda: are_asleep(client, workers))  # since nobody reads
        before = client.stats()
        assert [worker["running"] for worker in before.workers] == [1] * WORKERS
        scribble(workers[0])
        os.kill(workers[0], signal.SIGSEGV)
        daemon.until(lambda: client.stats().counters["kv_quarantined_total"])
        count = max(int(worker["rows"]) for worker in before.workers) + 300
        for stream, prompt in zip(streams, prompts, strict=True):
            assert [next(stream) for _ in range(count)] == expected(engine, prompt, count)
        for prompt in (*prompts, system):
            found = client.complete(prompt, **OPTIONS | {"max_tokens": 100})
            assert list(found.tokens) == expected(engine, prompt, 100)
    with Client(daemon.socket) as client:
        daemon.until(lambda: at_rest(client))
    (ended,) = daemon.log(msg="process ended")
    assert (ended["child"], ended["how"]) == ("worker 0", "by SIGSEGV")


def at_rest(client: Client) -> bool:
    """No slab is held or lost."""
    slabs = client.stats().kv_slabs
    return slabs["live"] == 0 and slabs["free"] + slabs["cached"] + slabs["quarantined"] == slabs["total"]
