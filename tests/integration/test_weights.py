"""Weight files under a running daemon: replaced by rename no worker notices, changed in place everybody is told."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from colibri_client import Admin, Client
from colibri_client.errors import BY_CODE
from colibri_daemon.common.exit_codes import Exit
from colibri_engine import Engine
from colibri_protocol.errors import Code
from fixtures.daemon import Daemon
from fixtures.models import Models

PROMPT = [1, 2, 3]
OPTIONS = {"threads": 1, "pinned": 0, "window": 64, "max_tokens_total": 1 << 20}
GEOMETRY = {"hidden": 128, "experts": 4, "vocab": 64}
FILES = ("manifest.json", "dense.bin", "experts.bin")


@pytest.fixture
def folder(models: Models, tmp_path: Path) -> Path:
    """A copy that may be spoiled."""
    return shutil.copytree(models.random(GEOMETRY), tmp_path / "model")


def replace(folder: Path, source: Path) -> None:
    for name in FILES:
        shutil.copyfile(source / name, folder / "new")
        (folder / "new").rename(folder / name)


def generates(daemon: Daemon) -> list[int]:
    with Client(daemon.socket) as client:
        return [int(token) for token in client.complete(PROMPT, max_tokens=30).tokens]


def test_a_worker_that_starts_after_a_rename_serves_the_old_files(folder: Path, models: Models) -> None:
    with Engine.open(folder) as engine:
        expected = engine.generate(PROMPT, 30, window=64)
    with Daemon(folder, workers=2, **OPTIONS) as daemon:
        replace(folder, models.random(GEOMETRY, seed=1))
        for slot in (0, 1):
            pid = daemon.pid_of(f"worker {slot}")
            os.kill(pid, signal.SIGKILL)
            daemon.until(lambda slot=slot, pid=pid: daemon.health().workers[slot].pid not in (0, pid))
            daemon.wait_ready()
        assert {tuple(generates(daemon)) for _ in range(4)} == {tuple(expected)}
        assert daemon.health().state == "ready"


def test_a_rename_while_the_daemon_starts_is_no_mixture(folder: Path, models: Models) -> None:
    """Whenever it comes: one of the two models, or a refusal that says so."""
    other = models.random(GEOMETRY, seed=1)
    outputs = []
    for source in (folder, other):
        with Engine.open(source) as engine:
            outputs.append(engine.generate(PROMPT, 30, window=64))
    with Daemon(folder, wait=False, **OPTIONS) as daemon:
        daemon.until(daemon.socket.exists)
        replace(folder, other)
        daemon.until(lambda: daemon.process.poll() is not None or _ready(daemon))
        if daemon.process.poll() is None:
            assert generates(daemon) in outputs
        else:
            assert daemon.process.returncode == Exit.CANNOT_LOAD
            assert "changed while the model was checked" in str(daemon.log(level="error"))


def _ready(daemon: Daemon) -> bool:
    try:
        return daemon.health().ready
    except OSError:
        return False


def spoiled(daemon: Daemon, path: Path) -> None:
    """It says so, and refuses what is new, naming the file."""
    reply = daemon.until(lambda: (told := daemon.health()).state == "degraded" and not told.ready and told)
    assert f"{path} was changed in place" in reply.reason
    with Client(daemon.socket, retries=0) as client, pytest.raises(BY_CODE[Code.NOT_READY], match=path.name):
        client.complete(PROMPT, max_tokens=1)


def test_a_file_that_was_written_to_is_named_and_what_runs_goes_on(folder: Path) -> None:
    with Daemon(folder, **OPTIONS) as daemon, Client(daemon.socket) as client:
        with client.generate(PROMPT, max_tokens=500_000) as stream:
            next(stream)
            path = folder / "dense.bin"
            with path.open("r+b") as file:  # the same bytes: only the time of change tells
                data = file.read(64)
                file.seek(0)
                file.write(data)
            spoiled(daemon, path)
            for _ in range(1000):
                next(stream)
        assert [line for line in daemon.log(level="error") if path.name in line.get("reason", "")]


def test_a_file_cut_short_under_load_ends_the_workers_once(folder: Path) -> None:
    """By their own exit code, and no other is started on such files."""
    with Daemon(folder, workers=2, **OPTIONS) as daemon, Client(daemon.socket, reconnect=0) as client:
        streams = [client.generate(PROMPT, max_tokens=500_000) for _ in range(4)]
        for stream in streams:
            next(stream)
        os.truncate(folder / "experts.bin", 4096)
        spoiled(daemon, folder / "experts.bin")
        daemon.until(lambda: not [title for title in daemon.titles().values() if title.startswith("worker")])
        for stream in streams:
            stream.close()
        ended = [line for line in daemon.log(msg="process ended") if line["child"].startswith("worker")]
        assert [line["how"] for line in ended] == [f"exit code {int(Exit.WEIGHTS_CHANGED)} (WEIGHTS_CHANGED)"] * 2
        assert "a mapped weight file was cut short" in (daemon.folder / "log").read_text()
        assert len(daemon.log(msg="loaded")) == 2
        assert not daemon.log(msg="request is suspected")


def test_a_reload_with_good_files_heals_it(folder: Path) -> None:
    """What ran when the workers ended goes on then, if it is the same model."""
    with Engine.open(folder) as engine:
        expected = engine.generate(PROMPT, 300, window=64)
    good = shutil.copytree(folder, folder.with_name("good"))
    with Daemon(folder, **OPTIONS) as daemon, Client(daemon.socket) as client:
        with client.generate(PROMPT, max_tokens=300) as stream:
            first = int(next(stream))
            os.truncate(folder / "dense.bin", 64)
            spoiled(daemon, folder / "dense.bin")
            replace(folder, good)
            with Admin(f"{daemon.socket}.admin") as admin:
                assert admin.reload()["generation"] == 2
            daemon.wait_ready()
            assert [first, *map(int, stream)] == expected
        assert generates(daemon) == expected[:30]
