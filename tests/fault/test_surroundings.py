"""What surrounds the daemon fails: the disk of its log is full, memory cannot be had, the clock jumps."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import pytest
from colibri_client import Client
from colibri_engine import Engine
from fixtures.daemon import Daemon
from fixtures.models import Models

PROMPT = [5, 6, 7, 8]
OPTIONS = {"temperature": 0.8, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(models: Models) -> Path:
    return models.tiny("q4")


def expected(model: Path, count: int) -> list[int]:
    with Engine.open(model) as engine:
        return list(engine.generate(PROMPT, count, temperature=0.8, seed=3, pinned=128, window=384))


def test_a_full_disk_costs_lines_of_the_log_and_nothing_else(model: Path) -> None:
    """Every write to /dev/full fails as on a full disk."""
    with Daemon(model, log_to="/dev/full", threads=1, workers=2) as daemon:
        worker = daemon.pid_of("worker 0")
        os.kill(worker, signal.SIGKILL)  # something to be logged
        with Client(daemon.socket) as client:
            assert list(client.complete(PROMPT, max_tokens=50, **OPTIONS).tokens) == expected(model, 50)
        daemon.wait_ready()


def test_a_worker_that_gets_no_more_memory_harms_no_stream(model: Path) -> None:
    """From some moment on nothing more can be mapped in one of them. Whether it ends of it or not, all outputs are
    right, and it can be replaced."""
    with Daemon(model, threads=1, workers=2) as daemon, Client(daemon.socket) as client:
        starved = daemon.pid_of("worker 0")
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
            resource.prlimit(starved, kind, (1 << 20, 1 << 20))
        right = expected(model, 300)
        biased = {"max_tokens": 300, "logit_bias": dict.fromkeys(range(9, 250), 0.1)}
        streams = [client.generate([*PROMPT, n], **biased, **OPTIONS) for n in range(16)]
        assert list(client.complete(PROMPT, max_tokens=300, **OPTIONS).tokens) == right
        assert [len(list(stream)) for stream in streams] == [300] * 16
        if starved in daemon.pids():
            os.kill(starved, signal.SIGKILL)
        daemon.until(lambda: starved not in daemon.pids())
        daemon.wait_ready()
        assert list(client.complete(PROMPT, max_tokens=300, **OPTIONS).tokens) == right


FAKETIME = next((str(path) for path in Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)


@pytest.mark.skipif(FAKETIME is None, reason="needs the Debian package libfaketime")
@pytest.mark.parametrize("jump", ["-400d", "+400d"])
def test_the_wall_clock_jumps(model: Path, tmp_path: Path, jump: str) -> None:
    """Deadlines, time-outs and judgements of health go by the monotonic clock."""
    offset = tmp_path / "offset"
    offset.write_text("+0")
    environ = {"LD_PRELOAD": FAKETIME, "FAKETIME_TIMESTAMP_FILE": str(offset), "FAKETIME_NO_CACHE": "1",
               "FAKETIME_DONT_FAKE_MONOTONIC": "1"}  # fmt: skip
    with Daemon(model, environ=environ, threads=1, hang_seconds=2) as daemon, Client(daemon.socket) as client:
        stream = client.generate(PROMPT, max_tokens=600, deadline_ms=60_000, **OPTIONS)
        first = [next(stream) for _ in range(10)]
        offset.write_text(jump)
        daemon.until(lambda: _year(daemon) != time.gmtime().tm_year)
        assert [*first, *stream] == expected(model, 600)
        assert daemon.health().state == "ready"
        assert daemon.log(msg="process ended") == []


def _year(daemon: Daemon) -> int:
    """As the daemon's log has it now."""
    with Client(daemon.socket) as client:
        client.complete(PROMPT, max_tokens=1)
    return int(daemon.log(msg="request ended")[-1]["ts"][:4])
