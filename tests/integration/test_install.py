"""make install and make uninstall: what is put where works there, and nothing else is left."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import colibri_engine
import pytest
from colibri_client import Client
from colibri_engine import Engine
from fixtures import daemon, installed
from fixtures.daemon import Daemon
from fixtures.installed import Installation
from fixtures.models import Models

CONFIGURATION = "/etc/colibri/colibrid.toml"


def run(installation: Installation, program: str, *arguments: str) -> str:
    """One of its programs. It stands elsewhere than it will, so its interpreter has to be named."""
    command = [installation.tree / "bin/python", f"{installation.destination}/usr/local/bin/{program}", *arguments]
    return subprocess.run(command, cwd="/", check=True, capture_output=True, text=True).stdout


def test_no_file_knows_the_destination(installation: Installation) -> None:
    destination = str(installation.destination).encode()
    found = list(installation.destination.rglob("*"))
    assert [path for path in found if path.is_file() and destination in path.read_bytes()] == []
    assert [path for path in found if path.is_symlink() and destination in os.fsencode(os.readlink(path))] == []


def test_what_the_units_start_is_there(installation: Installation) -> None:
    found = installation.files()
    assert {"/usr/local/bin/colibrid", "/usr/local/bin/colibri-client", "/usr/local/bin/colibri-bench", CONFIGURATION,
            "/usr/local/lib/systemd/system/colibri.service", "/usr/local/share/man/man1/colibrid-serve.1",
            "/usr/local/share/bash-completion/completions/colibri-client"} <= found  # fmt: skip
    scripts = [f"{installation.destination}/usr/local/bin/{name}" for name in ("colibrid", "colibri-client")]
    assert {Path(script).read_text().splitlines()[0] for script in scripts} == {"#!/usr/local/lib/colibri/bin/python"}


def test_programs_run(installation: Installation) -> None:
    assert "ok" in run(installation, "colibrid", "selftest")
    assert run(installation, "colibrid", "--version").split()[-1] == colibri_engine.__version__
    completion = f"{installation.destination}/usr/local/share/bash-completion/completions/colibri-client"
    subprocess.run(["bash", "-n", completion], check=True)


def test_it_serves(installation: Installation, models: Models, tmp_path: Path,
                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The installed daemon gives what this source's engine gives."""
    launcher = tmp_path / "colibrid"
    launcher.write_text(f'#!/bin/sh\nexec "{installation.tree}/bin/python" '
                        f'"{installation.destination}/usr/local/bin/colibrid" "$@"\n')  # fmt: skip
    launcher.chmod(0o755)
    monkeypatch.setattr(daemon, "COMMAND", launcher)
    with Daemon(models.tiny("q4")) as running, Client(running.socket) as client:
        tokens = client.complete([1, 2, 3], max_tokens=8).tokens
        health = run(installation, "colibri-client", "--socket", str(running.socket), "health")
    assert health.startswith("ready")
    with Engine.open(models.tiny("q4")) as engine:
        assert list(tokens) == engine.generate([1, 2, 3], 8, stop_ids=[2])


@pytest.mark.full  # three installations
def test_installed_over_and_removed(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Under another PREFIX: what was changed is kept, what the next version lacks goes, what was there before stays."""
    gateway = tmp_path / "gateway"
    gateway.write_text('#!/bin/sh\necho "Usage: colibri-gateway"\n')
    gateway.chmod(0o755)
    destination = tmp_path / "root"
    (destination / "usr/share/man").mkdir(parents=True)
    venv = installed.environment(tmp_path_factory.getbasetemp())
    ours = Installation(destination, venv, prefix="/usr", gateway=gateway)
    ours.make("install")
    first = ours.files()
    assert "/usr/lib/systemd/system/colibri-gateway.service" in first
    assert "ExecStart=/usr/bin/colibrid " in (destination / "usr/lib/systemd/system/colibri.service").read_text()
    configuration = Path(f"{destination}{CONFIGURATION}")
    configuration.write_text("workers = 2\n")

    ours.gateway = None
    ours.make("install")
    assert configuration.read_text() == "workers = 2\n"
    assert {path for path in first - ours.files() if "gateway.toml" not in path} == {
        "/usr/bin/colibri-gateway", "/usr/lib/systemd/system/colibri-gateway.service",
        "/usr/share/man/man1/gateway.1"}  # fmt: skip

    assert f"kept, since it was changed: {configuration}" in ours.make("uninstall")
    assert ours.files() == {CONFIGURATION}
    folders = {str(path.relative_to(destination)) for path in destination.rglob("*") if path.is_dir()}
    assert folders == {"usr", "usr/share", "usr/share/man", "etc", "etc/colibri"}
