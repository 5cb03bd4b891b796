"""The admin socket of the real daemon: who may use it, and what each command does to what runs."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from colibri_client import Admin, Client, errors
from colibri_client.errors import BY_CODE
from colibri_daemon.common.exit_codes import Exit
from colibri_protocol.errors import Code
from fixtures.daemon import Daemon
from fixtures.models import Models

PROMPT = [1 + i % 38 for i in range(300)]
OPTIONS = {"threads": 1, "workers": 2, "window": 128, "pinned": 0, "max_tokens_total": 1 << 20}


@pytest.fixture(scope="module")
def model(models: Models) -> Path:
    return models.random({"hidden": 64, "experts": 4})


@pytest.fixture
def daemon(model: Path) -> Iterator[Daemon]:
    with Daemon(model, **OPTIONS) as it:
        yield it


@pytest.fixture
def admin(daemon: Daemon) -> Iterator[Admin]:
    with Admin(f"{daemon.socket}.admin", timeout=60) as it:
        yield it


def generates(daemon: Daemon, count: int = 8) -> list[int]:
    with Client(daemon.socket, retries=0) as client:
        return [int(token) for token in client.complete(PROMPT, max_tokens=count).tokens]


# ---- the socket ----------------------------------------------------------------------------------------------------


def test_the_socket_is_for_us_alone_and_goes_with_the_daemon(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "a"
    with Daemon(model, admin_socket=path, **OPTIONS) as daemon:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert not Path(f"{daemon.socket}.admin").exists()
        with Admin(path) as admin:
            assert admin.dump()["dispatcher"]["pid"] == daemon.pid_of("dispatcher")
        daemon.stop()
        assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_refused_whatever_the_mode(daemon: Daemon) -> None:
    path = f"{daemon.socket}.admin"
    daemon.folder.chmod(0o755)
    script = "import os, socket, sys; os.setuid(4711); s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); " \
             "sys.stdout.buffer.write(s.recv(4096))"

    def tried() -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([sys.executable, "-c", script, path], capture_output=True)

    assert b"PermissionError" in tried().stderr
    os.chmod(path, 0o666)
    assert b"may not administer" in tried().stdout


def test_a_path_that_is_taken(model: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(tmp_path / "a"))
        taken.listen()
        with Daemon(model, wait=False, admin_socket=tmp_path / "a", **OPTIONS) as daemon:
            assert daemon.ended() == Exit.SOCKET
            assert not daemon.socket.exists()
            assert "in use by a running program" in str(daemon.log(level="error"))
    assert (tmp_path / "a").exists()


def test_orders_are_refused_on_the_client_socket(daemon: Daemon) -> None:
    with Admin(daemon.socket) as wrong, pytest.raises(BY_CODE[Code.PERMISSION], match="admin socket only"):
        wrong.drain()
    assert generates(daemon)


# ---- what is done --------------------------------------------------------------------------------------------------


def test_drain_and_resume(daemon: Daemon, admin: Admin) -> None:
    with Client(daemon.socket) as client, client.generate(PROMPT, max_tokens=400) as stream:
        next(stream)
        assert admin.drain() == {"live": 1}
        health = daemon.health()
        assert (health.live, health.ready, health.state) == (True, False, "draining")
        with pytest.raises(BY_CODE[Code.DRAINING]):
            generates(daemon)
        assert len(list(stream)) == 399
        assert admin.dump()["dispatcher"]["draining"]
        assert admin.resume() == {}
        assert len(client.complete(PROMPT, max_tokens=8).tokens) == 8  # by a new connection
    daemon.wait_ready()
    assert generates(daemon)


def test_a_drained_daemon_still_stops_in_order(daemon: Daemon, admin: Admin) -> None:
    admin.drain()
    daemon.until(lambda: daemon.health().state == "draining")
    assert daemon.stop() == Exit.STOPPED


@pytest.mark.parametrize("everything", [False, True])
def test_reload_drops_nothing(daemon: Daemon, admin: Admin, everything: bool) -> None:
    expected = generates(daemon, 600)
    before = daemon.titles()
    with Client(daemon.socket) as client, client.generate(PROMPT, max_tokens=600) as stream:
        first = int(next(stream))
        told = admin.reload(everything)
        assert told["generation"] == 2
        assert [first, *map(int, stream)] == expected
        assert generates(daemon, 600) == expected
    workers = {pid for pid, title in before.items() if title.startswith("worker")}
    daemon.until(lambda: not workers & daemon.pids())
    (dispatcher,) = (pid for pid, title in before.items() if title == "dispatcher")
    daemon.until(lambda: (dispatcher in daemon.pids()) != everything)


def test_a_reload_that_fails_says_why_and_changes_nothing(models: Models, tmp_path: Path) -> None:
    config = tmp_path / "colibrid.toml"
    config.write_text("window = 128\n")
    with Daemon(models.random({"hidden": 64, "experts": 4}), config=config, threads=1) as daemon:
        pids, expected = daemon.pids(), generates(daemon)
        with Admin(f"{daemon.socket}.admin", timeout=60) as admin:
            for text, reason in (("window = -1", "window"), ('socket_mode = "0600"', "restart"), ("x", "toml")):
                config.write_text(f"{text}\n")
                with pytest.raises(errors.AdminFailed, match=reason):
                    admin.reload()
        assert (daemon.pids(), generates(daemon)) == (pids, expected)


def test_evict(daemon: Daemon, admin: Admin) -> None:
    with Client(daemon.socket) as client:
        client.complete(PROMPT, max_tokens=40)
        daemon.until(lambda: client.token_check(PROMPT).cached_tokens >= 256)
        assert admin.evict(uid=os.getuid() + 1)["slabs"] == 0
        assert client.token_check(PROMPT).cached_tokens >= 256
        assert admin.evict(uid=os.getuid())["slabs"] >= 4
        assert client.token_check(PROMPT).cached_tokens == 0
        client.complete(PROMPT, max_tokens=40)
        daemon.until(lambda: client.token_check(PROMPT).cached_tokens >= 256)
        assert admin.evict()["slabs"] >= 4
        assert client.token_check(PROMPT).cached_tokens == 0


def test_log_level(daemon: Daemon, admin: Admin) -> None:
    """In every process, and in one that starts later."""
    everyone = admin.log_level("debug")["processes"]
    assert sorted(everyone) == ["dispatcher", "kvpool", "supervisor", "worker 0", "worker 1"]
    assert admin.log_level("error", "worker 0") == {"processes": ["worker 0"]}
    pid = daemon.pid_of("worker 0")
    os.kill(pid, 9)
    daemon.until(lambda: daemon.health().workers[0].restarts == 1)
    daemon.wait_ready()
    assert daemon.log(level="debug", role="supervisor", msg="started")
    with pytest.raises(errors.AdminFailed, match="there are dispatcher, kvpool, supervisor, worker 0, worker 1"):
        admin.log_level("info", "nobody")


def test_dump_sees_what_runs(daemon: Daemon, admin: Admin) -> None:
    with Client(daemon.socket) as client, client.generate(PROMPT, max_tokens=100_000) as stream:
        next(stream)
        found = admin.dump()
        (request,) = found["requests"]
        assert (request["uid"], request["phase"], request["prompt"]) == (os.getuid(), "running", len(PROMPT))
        assert {worker["pid"] for worker in found["workers"]} == {daemon.pid_of(f"worker {slot}") for slot in (0, 1)}
        assert sum(worker["running"] for worker in found["workers"]) == 1
    daemon.until(lambda: not admin.dump()["requests"])
