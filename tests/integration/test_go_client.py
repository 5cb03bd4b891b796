"""The Go client with the real daemon: client/go/unixsock/real_test.go, while processes of the daemon are killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from colibri_engine import Engine
from fixtures.daemon import Daemon
from fixtures.models import Models

pytestmark = pytest.mark.skipif(shutil.which("go") is None, reason="needs Go")
GO = Path(__file__).resolve().parents[2] / "client" / "go"
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.5},
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests of the package, compiled, so that kills do not come before it runs."""
    path = tmp_path_factory.mktemp("go") / "unixsock.test"
    subprocess.run(["go", "test", "-c", "-o", path, "./unixsock"], cwd=GO, check=True)
    return path


@pytest.fixture(scope="module")
def cases(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests with what the engine alone makes of them."""
    rng, made = random.Random(6), []
    with Engine.open(models.tiny("q4")) as engine:
        for n in range(24):
            prompt = [rng.randrange(engine.info.vocab) for _ in range(rng.randrange(1, 150))]
            sampling = SAMPLINGS[n % 3] | ({"seed": rng.getrandbits(64)} if n % 3 else {})
            tokens = engine.generate(prompt, 120, **sampling)
            request = {"tokens": prompt, "max_tokens": 120, "ignore_eos": True, **sampling}
            made.append({"Request": request, "Tokens": tokens})
    path = tmp_path_factory.mktemp("cases") / "cases.json"
    path.write_text(json.dumps(made))
    return path


@pytest.fixture(scope="module")
def daemon(models: Models) -> Iterator[Daemon]:
    with Daemon(models.tiny("q4"), workers=2, threads=1) as running:
        yield running


def start(program: Path, daemon: Daemon, tests: str, **environment: object) -> subprocess.Popen[str]:
    variables = {"COLIBRI_TEST_SOCKET": daemon.socket, **environment}
    return subprocess.Popen([program, "-test.v", "-test.run", tests], cwd=GO / "unixsock", text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env=os.environ | {name: str(value) for name, value in variables.items()})  # fmt: skip


def test_verbs_and_readers_that_leave(program: Path, daemon: Daemon) -> None:
    run = start(program, daemon, "TestRealVerbs|TestRealReadersThatLeave")
    output, _ = run.communicate()
    assert run.returncode == 0, output
    assert output.count("--- PASS") == 2


def test_kills_fail_and_change_no_stream(program: Path, cases: Path, daemon: Daemon) -> None:
    run = start(program, daemon, "TestRealStreamsThroughKills", COLIBRI_TEST_CASES=cases)
    try:
        for role in ("worker 0", "dispatcher", "worker 1", "worker 0", "dispatcher"):
            daemon.until(lambda: any(worker.busy for worker in daemon.health().workers))
            pid = daemon.pid_of(role)
            os.kill(pid, signal.SIGKILL)
            daemon.until(lambda: pid not in daemon.pids())  # noqa: B023
            daemon.wait_ready()
    finally:
        output, _ = run.communicate()
    assert run.returncode == 0, output
    assert "--- PASS" in output


def test_a_stream_goes_on_as_it_began(program: Path, models: Models, tmp_path: Path) -> None:
    """Lost after a reload that changed what tokens attend to: for new streams, not for this one."""
    prompt, length = [5, 6, 7], 2000  # more than is sent to a reader that waits
    with Engine.open(models.tiny("q4")) as engine:
        begun, changed = (engine.generate(prompt, length, window=window) for window in (64, 128))
    assert begun != changed
    request = {"tokens": prompt, "max_tokens": length, "ignore_eos": True}
    cases, settings = tmp_path / "cases.json", tmp_path / "colibrid.toml"
    cases.write_text(json.dumps([{"Request": request, "Tokens": begun}]))
    settings.write_text("pinned = 0\nwindow = 64")
    with Daemon(models.tiny("q4"), config=settings, threads=1) as daemon:
        run = start(program, daemon, "TestRealStreamOverReload", COLIBRI_TEST_CASES=cases)
        try:
            assert "begun\n" in run.stdout
            settings.write_text("pinned = 0\nwindow = 128")
            daemon.signal(signal.SIGHUP)
            daemon.until(lambda: daemon.log(msg="reload done"))
            os.kill(daemon.pid_of("dispatcher"), signal.SIGKILL)
        finally:
            output, _ = run.communicate()
    assert run.returncode == 0, output
