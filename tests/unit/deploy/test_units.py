"""The units and what belongs to them, as systemd's own tools see them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from colibri_daemon.common.exit_codes import Exit
from colibri_daemon.common.settings import Settings
from colibri_daemon.supervisor.fdstore import KINDS
from colibri_daemon.supervisor.lifecycle import ABORT_SECONDS
from colibri_daemon.supervisor.publish import EXTEND_SECONDS, STOP_SECONDS

UNITS = Path(__file__).resolve().parents[3] / "deploy" / "systemd"
SERVICES = sorted(path.name for path in UNITS.glob("*.service"))
EXPOSURE = 20  # tenths
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs the package systemd")


def value(unit: str, key: str) -> str:
    """The last value of a key."""
    return re.findall(rf"^{key}=(.*)$", (UNITS / unit).read_text(), re.MULTILINE)[-1]


def version() -> int:
    """Of systemd."""
    told = subprocess.run(["systemd-analyze", "--version"], check=True, capture_output=True, text=True).stdout
    return int(told.split()[1])


@needs_systemd
def test_systemd_knows_every_line(tmp_path: Path) -> None:
    """The programs of the units are not there; drop-ins are read with their unit."""
    units = []
    for unit in (*SERVICES, "colibri.socket"):
        units.append(tmp_path / unit)
        units[-1].write_text(re.sub(r"/usr/local/bin/colibri[a-z-]*", "/bin/true", (UNITS / unit).read_text()))
    drop_ins = [path for path in UNITS.glob("*-*.conf") if version() >= 254 or path.name != "newer-systemd.conf"]
    (tmp_path / "colibri.service.d").mkdir()
    for path in drop_ins:
        shutil.copy(path, tmp_path / "colibri.service.d")
    assert drop_ins
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True)
    assert [line for line in done.stderr.splitlines() if "colibri" in line] == []
    assert done.returncode == 0, done.stderr


@needs_systemd
@pytest.mark.parametrize(("unit", "drop_ins"), [*((unit, ()) for unit in SERVICES),
                                                ("colibri.service", ("metrics-on-loopback.conf",))])  # fmt: skip
def test_exposure(unit: str, drop_ins: tuple[str, ...], tmp_path: Path) -> None:
    """A drop-in is appended: offline, only one file is read."""
    path = tmp_path / unit
    path.write_text("\n".join((UNITS / name).read_text() for name in (unit, *drop_ins)))
    done = subprocess.run(["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", path],
                          capture_output=True, text=True)  # fmt: skip
    assert "Overall exposure level" in done.stdout
    assert done.returncode == 0, done.stdout


def test_what_the_unit_says_is_what_the_daemon_does() -> None:
    defaults = Settings()
    assert value("colibri.socket", "ListenStream") == str(defaults.socket)
    assert value("colibri.socket", "SocketMode") == f"{defaults.socket_mode:04o}"
    assert Path("/run") / value("colibri.service", "RuntimeDirectory") == defaults.socket.parent
    assert int(value("colibri.service", "TimeoutStopSec")) == defaults.drain_seconds + STOP_SECONDS
    assert int(value("colibri.service", "TimeoutStartSec")) > EXTEND_SECONDS
    assert int(value("colibri.service", "WatchdogSec")) > 2 * (defaults.hang_seconds + ABORT_SECONDS)
    assert int(value("colibri.service", "FileDescriptorStoreMax")) >= len(KINDS)
    final = {Exit.USAGE, Exit.CANNOT_LOAD, Exit.SOCKET}
    assert value("colibri.service", "RestartPreventExitStatus").split() == [str(int(code)) for code in sorted(final)]


@needs_systemd
def test_users_and_folders(tmp_path: Path) -> None:
    """The two files do what they should in an empty root."""
    (tmp_path / "etc").mkdir()
    subprocess.run(["systemd-sysusers", f"--root={tmp_path}", UNITS / "sysusers.conf"], check=True, capture_output=True)
    members = dict(line.split(":")[::3] for line in (tmp_path / "etc/group").read_text().splitlines())
    assert members["colibri"] == "colibri-gateway"
    owned = [line.split() for line in (UNITS / "tmpfiles.conf").read_text().splitlines() if line[0] != "#"]
    assert {row[1]: row[2:5] for row in owned} == {"/run/colibri": ["0750", "colibri", "colibri"],
                                                   "/var/lib/colibri": ["0755", "root", "root"]}  # fmt: skip
