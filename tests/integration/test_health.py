"""HEALTH tells the truth: processes that are stopped are named within the set time, busy ones are never suspected."""

from __future__ import annotations

import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from colibri_client import Client
from colibri_protocol.messages import HealthReply
from fixtures.daemon import Daemon
from fixtures.models import Models

PATIENT = {"threads": 1, "degraded_seconds": 1, "hang_seconds": 60}
HASTY = {"threads": 1, "degraded_seconds": 1, "hang_seconds": 2}


@pytest.fixture(scope="module")
def model(models: Models) -> Path:
    return models.tiny("q4")


def reaches(daemon: Daemon, state: str, ready: bool) -> HealthReply:
    def there() -> HealthReply | None:
        reply = daemon.health()
        return reply if (reply.state, reply.ready) == (state, ready) else None

    found = daemon.until(there)
    assert found is not None
    return found


def generates(daemon: Daemon) -> int:
    with Client(daemon.socket) as client:
        return len(client.complete([1, 2, 3], max_tokens=8).tokens)


def test_an_idle_worker_that_is_stopped_is_named_until_it_goes_on(model):
    with Daemon(model, workers=2, **PATIENT) as daemon:
        pid = daemon.pid_of("worker 1")
        os.kill(pid, signal.SIGSTOP)
        reply = reaches(daemon, "degraded", True)
        assert reply.reason == f"no progress: worker 1 (pid {pid})"
        assert [worker.up for worker in reply.workers] == [True, False]
        assert reply.workers[1].progress_age_ms >= 1000
        with ThreadPoolExecutor(8) as several:  # nobody is given to the one that stands still
            assert list(several.map(lambda _: generates(daemon), range(8))) == [8] * 8
        os.kill(pid, signal.SIGCONT)
        assert [worker.pid for worker in reaches(daemon, "ready", True).workers][1] == pid
        assert generates(daemon) == 8


def test_without_any_worker_that_moves_it_is_not_ready(model):
    with Daemon(model, workers=2, **PATIENT) as daemon:
        pids = [daemon.pid_of(f"worker {slot}") for slot in (0, 1)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        assert all(f"pid {pid}" in reaches(daemon, "degraded", False).reason for pid in pids)
        with ThreadPoolExecutor(1) as one, Client(daemon.socket) as client:
            waiting = one.submit(generates, daemon)
            daemon.until(lambda: client.stats().waiting == 1)
            os.kill(pids[0], signal.SIGCONT)
            assert waiting.result() == 8
        reaches(daemon, "degraded", True)
        os.kill(pids[1], signal.SIGCONT)
        assert not any(worker.restarts for worker in reaches(daemon, "ready", True).workers)
        assert generates(daemon) == 8


def test_a_stopped_pool_is_named(model):
    with Daemon(model, **PATIENT) as daemon:
        pid = daemon.pid_of("kvpool")
        os.kill(pid, signal.SIGSTOP)
        assert reaches(daemon, "degraded", True).reason == "no progress: the KV pool"
        os.kill(pid, signal.SIGCONT)
        reaches(daemon, "ready", True)


@pytest.mark.parametrize("role", ["worker 0", "kvpool", "dispatcher"])
def test_who_stays_stopped_is_replaced(model, role):
    """The dispatcher too, which alone could have told."""
    with Daemon(model, **HASTY) as daemon:
        pid = daemon.pid_of(role)
        os.kill(pid, signal.SIGSTOP)
        daemon.until(lambda: pid not in daemon.pids())
        daemon.until(lambda: daemon.pid_of(role) != pid)
        reaches(daemon, "ready", True)
        assert generates(daemon) == 8
        (line,) = daemon.log(msg="no progress, the process is ended")
        assert (line["child"], line["child_pid"]) == (role, pid)
        assert daemon.log(msg="state", state="degraded")


def test_a_worker_at_work_is_never_suspected(models):
    """A prompt that takes many times hang_seconds, in steps of up to about half a second each."""
    slow = models.random({"hidden": 256, "inter": 512, "layers": 4, "experts": 2, "context": 16384})
    with Daemon(slow, threads=1, degraded_seconds=1, hang_seconds=1, step_tokens=512, window=0) as daemon:
        replies: list[HealthReply] = []
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.05):
                replies.append(daemon.health())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with Client(daemon.socket) as client:
                client.complete([1 + i % 39 for i in range(6000)], max_tokens=1)
        finally:
            done.set()
            watcher.join()
        assert len([reply for reply in replies if reply.workers[0].busy]) > 5
        assert {(reply.state, reply.workers[0].restarts) for reply in replies} == {("ready", 0)}


def test_an_idle_daemon_costs_next_to_nothing(model):
    """Beating twice a second is no spinning: context switches of the worker's only thread, counted."""
    with Daemon(model, threads=1) as daemon:
        pid = daemon.pid_of("worker 0")

        def switches() -> int:
            (found,) = re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)
            return int(found)

        def age() -> float:
            return float(Path("/proc/uptime").read_text().split()[0])

        begun, before = age(), switches()
        daemon.until(lambda: switches() >= before + 4)
        assert (switches() - before) / (age() - begun) < 20
