"""What README.md shows works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from colibri_engine import Engine
from fixtures.daemon import Daemon
from fixtures.models import Models

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, containing: str) -> str:
    """The one code block of README.md in a language that contains a text."""
    (found,) = (b for b in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if containing in b)
    return found


@pytest.fixture(scope="module")
def daemon(models: Models) -> Iterator[Daemon]:
    with Daemon(models.tiny("q4")) as running:
        yield running


def test_python(daemon: Daemon) -> None:
    """Token ids are cut to the small model's vocabulary."""
    code = block("python", "colibri_client").replace("/tmp/colibri.sock", str(daemon.socket)).replace("5565", "565")
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 64 + 2
    assert all(line.isdigit() for line in lines[:64])


@pytest.mark.skipif(shutil.which("go") is None, reason="needs Go")
def test_go(daemon: Daemon, models: Models) -> None:
    example = (ROOT / "client" / "go" / "example_test.go").read_text(encoding="utf-8")
    assert block("go", "func ask") in example
    run = subprocess.run(["go", "test", "-count=1", "-v", "-run", "TestAsk", "."], cwd=ROOT / "client" / "go",
                         env={**os.environ, "COLIBRI_SOCKET": str(daemon.socket)}, capture_output=True, text=True,
                         check=True)
    tokens = [int(t) for line in re.findall(r"^\[(.*)\]$", run.stdout, re.MULTILINE) for t in line.split()]
    with Engine.open(models.tiny("q4")) as engine:
        assert tokens == engine.generate([1, 415, 565], 16, stop_ids=[2])


def test_shell(daemon: Daemon) -> None:
    """The commands after `serve`, but for those that wait for a person or need the chat template."""
    lines = [line for line in block("sh", "colibrid serve").splitlines() if line.startswith("colibri-client")]
    environment = {**os.environ, "COLIBRI_SOCKET": str(daemon.socket),
                   "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    tried = [line.partition("#")[0].replace("--chat", "--text") for line in lines if line.split()[1] in
             ("health", "generate")]
    assert len(tried) == 2
    for line in tried:
        subprocess.run(line, shell=True, env=environment, check=True, stdout=subprocess.DEVNULL)
