"""The whole service ends and starts again with a service manager that keeps its descriptors (fixtures/manager.py): the
prefix cache stays warm, no bit changes, nobody is refused. The same under a real systemd: test_systemd_restart.py."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from colibri_client import Client, Completion
from colibri_daemon.supervisor.fdstore import ADMIN, ARENA, CLIENTS, JOURNAL, KINDS
from colibri_engine import Engine
from fixtures.daemon import PATIENCE, Daemon
from fixtures.manager import Manager
from fixtures.models import Models

BLOCK, PINNED, WINDOW = 64, 128, 384  # of the tiny model, as the daemon uses it
DOUBTED = 3.5  # seconds: what was committed so shortly before a life that ended without a word is not used again


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with Manager(tmp_path) as running:
        yield running


PROMPTS = [[random.Random(seed).randrange(3, 2048) for _ in range(5 * BLOCK + 10)] for seed in range(4)]


@pytest.fixture(scope="module")
def truth(models: Models) -> list[list[int]]:
    with Engine.open(models.tiny("q4")) as engine:
        return [engine.generate(prompt, 8, pinned=PINNED, window=WINDOW) for prompt in PROMPTS]


def ask(daemon: Daemon) -> list[Completion]:
    with Client(daemon.socket, connect_timeout=PATIENCE) as client:
        return [client.complete(prompt, max_tokens=8, ignore_eos=True) for prompt in PROMPTS]


def tokens(answers: list[Completion]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def hit_rate(answers: list[Completion]) -> float:
    return sum(a.usage.cached for a in answers) / sum(map(len, PROMPTS))


def test_three_lives(manager: Manager, models: Models, truth: list[list[int]]) -> None:
    """The first ends in order, the second by SIGKILL. Who connects in between is served by the next."""
    model = models.tiny("q4")
    with manager.start(model, workers=1, threads=1) as daemon, ThreadPoolExecutor() as pool:
        cold, warm = ask(daemon), ask(daemon)
        committed = time.monotonic()
        assert (hit_rate(cold), tokens(cold), tokens(warm)) == (0, truth, truth)
        assert daemon.stop() == 0
        asked = pool.submit(ask, daemon)  # nobody is there to answer
        with manager.start(model, workers=1, threads=1) as second:
            again = asked.result()
            assert hit_rate(again) == hit_rate(warm) > 0.9
            assert tokens(again) == truth
            time.sleep(max(0.0, committed + DOUBTED - time.monotonic()))
            second.kill()
            asked = pool.submit(ask, daemon)
            with manager.start(model, workers=1, threads=1):
                last = asked.result()
    assert (hit_rate(last), tokens(last)) == (hit_rate(warm), truth)
    assert sorted(name.partition(".")[0] for name, _ in manager.store) == sorted(KINDS)


@pytest.mark.full
def test_damage_while_nobody_watched(manager: Manager, models: Models, truth: list[list[int]]) -> None:
    """A slab that is not what the journal says is found by its CRC and computed again."""
    with manager.start(models.tiny("q4"), workers=1, threads=1) as daemon:
        assert tokens(ask(daemon)) == truth
        with Client(daemon.socket) as client:
            slabs = int(client.stats().kv_slabs["cached"])
        size = daemon.log(msg="memory")[0]["slab_bytes"]
    arena = manager.of(ARENA)
    for slab in range(slabs):
        os.pwrite(arena, bytes(100), slab * size + 500)
    with manager.start(models.tiny("q4"), workers=1, threads=1) as daemon:
        assert tokens(ask(daemon)) == truth
        with Client(daemon.socket) as client:
            assert client.stats().kv_slabs["quarantined"] > 0


def test_what_is_not_ours_is_refused(manager: Manager, models: Models, truth: list[list[int]]) -> None:
    """Nothing in the store is what it should be; the service begins with an empty cache, and keeps that."""
    for kind in KINDS:
        fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
        os.pwrite(fd, os.urandom(4096), 0)
        manager.store.append((f"{kind}.1-2" if kind in (CLIENTS, ADMIN) else kind, fd))
    strangers = {os.fstat(fd).st_ino for _, fd in manager.store}
    with manager.start(models.tiny("q4"), workers=1, threads=1) as daemon:
        assert tokens(ask(daemon)) == truth
        assert len(daemon.log(msg="the kept socket is not used")) == 2
        (line,) = daemon.log(msg="the kept KV cache is not used")
        assert line["reason"].startswith("its note has 4096 bytes and seals 0x0")
        daemon.until(lambda: len(manager.store) == len(KINDS))
    assert not strangers & {os.fstat(manager.of(kind)).st_ino for kind in KINDS}


@pytest.mark.full
def test_a_journal_that_cannot_be_read(manager: Manager, models: Models, truth: list[list[int]]) -> None:
    """Of another version, shorter, and all of it nonsense."""
    with manager.start(models.tiny("q4"), workers=1, threads=1) as daemon:
        ask(daemon)
    journal = manager.of(JOURNAL)
    os.truncate(journal, 5000)
    os.pwrite(journal, random.Random(1).randbytes(4900), 40)  # from the version on
    with manager.start(models.tiny("q4"), workers=1, threads=1) as daemon:
        answers = ask(daemon)
        (line,) = daemon.log(msg="the journal is not used, the KV cache begins empty")
        assert line["reason"] == "it is of another version"
    assert (hit_rate(answers), tokens(answers)) == (0, truth)
