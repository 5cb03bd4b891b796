"""The real daemon as an operator sees it: start, ps, signals, deaths, refusals, exit codes."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from colibri_client import Client
from colibri_daemon.common.exit_codes import Exit
from fixtures.daemon import Daemon
from fixtures.models import Models

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def model(models: Models) -> Path:
    return models.tiny("q4")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """For sockets that tests prepare: pytest removes it, with everything in it."""
    return tmp_path / "s"


def generates(daemon: Daemon) -> list[int]:
    with Client(daemon.socket) as client:
        return list(client.complete(PROMPT, max_tokens=8).tokens)


def test_start_and_stop(model):
    with Daemon(model, workers=2, threads=1) as daemon:
        assert sorted(daemon.titles().values()) == ["dispatcher", "kvpool", "supervisor", "worker 0", "worker 1"]
        assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o660
        assert len(generates(daemon)) == 8
        health = daemon.health()
        assert (health.live, health.ready, health.state, health.reason) == (True, True, "ready", "")
        assert [worker.pid for worker in health.workers] == [daemon.pid_of("worker 0"), daemon.pid_of("worker 1")]
        assert all(worker.up for worker in health.workers)
        daemon.until(lambda: all(worker.resident_bytes > 1 << 20 for worker in daemon.health().workers))
        assert daemon.stop() == Exit.STOPPED
        assert not daemon.socket.exists()
        assert daemon.pids() == set()
        assert daemon.log(level="error") == []
        (line,) = daemon.log(msg="ready")
        assert (line["workers"], line["socket"]) == (2, str(daemon.socket))
        assert line["kv_bytes"] > 0


def test_health_before_ready(model):
    """Asked from the first moment: never an error once the socket is there, and ready at the end."""
    with Daemon(model, wait=False, verify=True) as daemon:
        daemon.until(daemon.socket.exists)
        states = [daemon.until(daemon._health_if_up).state]
        while states[-1] != "ready":
            states.append(daemon.health().state)
        assert set(states) == {"starting", "ready"}


def test_a_request_that_comes_early_waits(model):
    with Daemon(model, wait=False) as daemon:
        daemon.until(daemon.socket.exists)
        assert len(generates(daemon)) == 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_streams_finish(model, number):
    with Daemon(model, threads=1) as daemon, Client(daemon.socket) as client:
        stream = iter(client.generate(PROMPT, max_tokens=200, ignore_eos=True))
        next(stream)
        daemon.signal(number)
        assert sum(1 for _ in stream) == 199
        client.close()
        assert daemon.ended() == Exit.STOPPED


def test_ctrl_c_in_a_terminal_reaches_all_and_still_drains(model):
    """The terminal sends SIGINT to the whole process group."""
    with Daemon(model, threads=1) as daemon, Client(daemon.socket) as client:
        stream = iter(client.generate(PROMPT, max_tokens=200, ignore_eos=True))
        next(stream)
        os.killpg(daemon.process.pid, signal.SIGINT)
        assert sum(1 for _ in stream) == 199
        client.close()
        assert daemon.ended() == Exit.STOPPED
        assert daemon.log(level="error") == []


def test_nothing_outlives_the_supervisor(model):
    with Daemon(model, workers=2, threads=1) as daemon:
        pidfds = [os.pidfd_open(pid) for pid in daemon.pids() - {daemon.process.pid}]
        daemon.kill()
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], 20)[0]
            os.close(pidfd)
        assert daemon.socket.exists()
        with Daemon(model, socket=daemon.socket) as successor:  # replaces what is left
            assert len(generates(successor)) == 8


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_that_dies_is_replaced(model, number):
    with Daemon(model, threads=1) as daemon:
        expected, first = generates(daemon), daemon.pid_of("worker 0")
        os.kill(first, number)
        health = daemon.until(lambda: (h := daemon.health()).ready and h.workers[0].restarts == 1 and h)
        assert health.workers[0].pid != first
        assert generates(daemon) == expected
        (line,) = daemon.log(msg="process ended")
        assert (line["child"], line["how"]) == ("worker 0", f"by {signal.Signals(number).name}")


def test_a_dispatcher_that_dies_is_replaced(model):
    """On the same socket, in front of the same workers."""
    with Daemon(model, workers=2, threads=1) as daemon:
        expected, workers = generates(daemon), {daemon.pid_of("worker 0"), daemon.pid_of("worker 1")}
        os.kill(daemon.pid_of("dispatcher"), signal.SIGKILL)
        daemon.until(lambda: daemon.log(msg="process ended", child="dispatcher"))
        daemon.wait_ready()
        assert generates(daemon) == expected
        assert {daemon.pid_of("worker 0"), daemon.pid_of("worker 1")} == workers


def without(name: str):
    def damage(model: Path) -> None:
        (model / name).unlink()

    return damage


def shortened(model: Path) -> None:
    os.truncate(model / "experts.bin", (model / "experts.bin").stat().st_size - 4096)


def nonsense(model: Path) -> None:
    (model / "manifest.json").write_text("{")


@pytest.mark.parametrize("damage", [shutil.rmtree, without("manifest.json"), without("dense.bin"), shortened, nonsense])
def test_a_model_that_cannot_be_loaded(model, tmp_path, damage):
    """One attempt, one clear line that names the folder, its own exit code."""
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    damage(broken)
    with Daemon(broken, wait=False) as daemon:
        assert daemon.ended() == Exit.CANNOT_LOAD
        (line,) = daemon.log(msg="the service ends")
        assert str(broken) in line["reason"]
        assert not daemon.socket.exists()
        assert not any("Traceback" in str(line) for line in daemon.log())


def test_a_damaged_model_is_found_by_verify(model, tmp_path):
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    with (broken / "experts.bin").open("r+b") as f:
        f.seek(100_000)
        f.write(b"\xff" * 64)
    with Daemon(broken, wait=False, verify=True) as daemon:
        assert daemon.ended() == Exit.CANNOT_LOAD
        assert "experts.bin" in daemon.log(msg="the service ends")[0]["reason"]


def test_a_weight_file_that_goes_away_later(model, tmp_path):
    """It is open: a worker that must start again gets it. A reload, which opens it anew, is refused."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    with Daemon(folder, threads=1) as daemon:
        expected, first = generates(daemon), daemon.pid_of("worker 0")
        (folder / "dense.bin").unlink()
        os.kill(first, signal.SIGKILL)
        daemon.until(lambda: (health := daemon.health()).ready and health.workers[0].pid != first)
        daemon.signal(signal.SIGHUP)
        (line,) = daemon.until(lambda: daemon.log(msg="reload failed, nothing was changed"))
        assert "dense.bin" in line["reason"]
        assert generates(daemon) == expected


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text("precious"), "is a file"),
        (lambda path: path.mkdir(), "is a directory"),
        (lambda path: path.symlink_to("x"), "is a symbolic link"),
    ],
)
def test_a_socket_path_that_is_taken(model, place, make, words):
    make(place)
    before = os.lstat(place)
    with Daemon(model, wait=False, socket=place) as daemon:
        assert daemon.ended() == Exit.SOCKET
        assert f"{place}: {words}" in daemon.log(msg="the socket cannot be used")[0]["error"]
    after = os.lstat(place)
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_dead_socket_is_replaced(model, place):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(place))
    with Daemon(model, socket=place) as daemon:
        assert len(generates(daemon)) == 8


def test_a_second_daemon_is_refused_and_the_first_goes_on(model):
    with Daemon(model) as first:
        with Daemon(model, wait=False, socket=first.socket) as second:
            assert second.ended() == Exit.SOCKET
            assert "in use by a running program" in second.log(msg="the socket cannot be used")[0]["error"]
        assert len(generates(first)) == 8


def test_usage(model):
    with Daemon(model, wait=False, workers=0) as daemon:
        assert daemon.ended() == Exit.USAGE
    with Daemon("", wait=False) as daemon:
        assert daemon.ended() == Exit.USAGE
