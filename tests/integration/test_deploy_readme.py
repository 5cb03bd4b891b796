"""deploy/README.md, line by line, on a bare Debian 12 under a real systemd."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures import machine
from fixtures.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")


def commands(text: str) -> list[str]:
    return [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines() if line]


COMMANDS = commands(README)
# Without what is for a later systemd than Debian 12's.
FOR_OLDER = commands(re.sub(r"## Newer systemd\n.*?(?=\n## )", "", README, flags=re.DOTALL))
# The machine's own network is loopback alone; these use the host's.
FETCHING = ("apt-get ", "make wheel")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
# What the source tree is without what was built in it: what somebody else would have.
NOT_SOURCE = shutil.ignore_patterns("build", ".git", ".venv", "__pycache__", "*.egg-info", "*.so", "*.so.1", ".*_cache")


def test_commands_are_known() -> None:
    """Each line begins with a program that is there by then, and every unit is one of ours."""
    programs = {"apt-get", "make", "systemd-sysusers", "systemd-tmpfiles", "systemctl", "colibrid", "colibri-client",
                "colibri-gateway", "ln", "sed", "chown", "chmod", "curl", "journalctl", "install"}  # fmt: skip
    assert {line.split()[0] for line in COMMANDS} == programs
    units = {unit for line in COMMANDS for unit in re.findall(r"[\w-]+\.(?:service|socket)(?=\s|$)", line)}
    ours = {path.name for path in (ROOT / "deploy" / "systemd").iterdir() if path.suffix in (".service", ".socket")}
    assert units == ours | {"prometheus.service"}


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A bare Debian 12, or the root file system that COLIBRI_DEBIAN names, with the source in /root/colibri and, if
    there is one, the gateway built elsewhere."""
    machine.require()
    if shutil.which("debootstrap") is None:
        pytest.skip("needs the package debootstrap")
    root = Path(os.environ.get("COLIBRI_DEBIAN", tmp_path_factory.mktemp("debian") / "root"))
    if not (root / "lib/systemd/systemd").exists():
        packages = "--include=systemd,systemd-sysv,ca-certificates"
        subprocess.run(["debootstrap", "--variant=minbase", packages, "bookworm", root], check=True)
    source = tmp_path_factory.mktemp("source") / "colibri"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCE)
    if (gateway := Path(os.environ.get("COLIBRI_GATEWAY", ROOT / "build" / "colibri-gateway"))).exists():
        (source / "build").mkdir()
        shutil.copy(gateway, source / "build" / "colibri-gateway")
    with Machine(root) as booted:
        booted.copy(source, "/root/colibri")
        booted.run(f"cat > {CERTIFICATES}", given=Path(CERTIFICATES).read_text())  # the network may have one of its own
        yield booted


@pytest.mark.full
def test_every_line_works(debian: Machine) -> None:
    """Afterwards nothing of ours is left but what the text says."""
    has_gateway = debian.run("test -e colibri/build/colibri-gateway", check=False).returncode == 0
    before = set(debian.run(LISTING).stdout.split())
    newer = int(debian.run("systemctl --version").stdout.split()[1]) >= 254
    for line in COMMANDS if newer else FOR_OLDER:
        if has_gateway or not re.search(r"gateway|^curl .*:8080|api-keys", line):
            fetching = line.startswith(FETCHING)
            trust = f"export PIP_CERT={CERTIFICATES}; " if fetching else ""
            done = debian.run(f"cd colibri; {trust}{line}", network=fetching)
            print(f"# {line}\n{done.stdout}")
            assert "api/v1/rules" not in line or "ColibriDown" in done.stdout  # Prometheus has the alerts
    left = set(debian.run(LISTING).stdout.split()) - before
    assert {path for path in left if "colibri" in path} <= {
        "/etc/colibri", "/etc/colibri/api-keys", "/etc/colibri/colibri-gateway.toml", "/etc/colibri/colibrid.toml",
        "/etc/systemd/system/colibri.service.d", "/etc/systemd/system/colibri.service.d/newer-systemd.conf",
        "/etc/systemd/system/colibri.service.d/metrics-on-loopback.conf"}  # fmt: skip


LISTING = "find /etc /usr/local /opt"
