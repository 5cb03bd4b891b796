"""deploy/RUNBOOK.md has a line for everything an operator can be shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from colibri_daemon.common.exit_codes import Exit
from colibri_daemon.common.settings import SETTINGS
from colibri_daemon.supervisor.loop import HANDLERS
from colibri_protocol.errors import Code

RUNBOOK = (Path(__file__).parents[3] / "deploy" / "RUNBOOK.md").read_text()


def section(title: str) -> str:
    return RUNBOOK.split(f"## {title}", 1)[1].split("\n## ", 1)[0]


def rows(title: str) -> list[list[str]]:
    """The cells of a table's rows."""
    lines = [line for line in section(title).splitlines() if line.startswith("| ") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][1:]


@pytest.mark.parametrize(("title", "kind"), [("Exit codes", Exit), ("Error codes", Code)])
def test_every_code_has_its_line(title: str, kind: type[Exit] | type[Code]) -> None:
    assert [(int(row[0]), row[1]) for row in rows(title)] == [(int(code), code.name) for code in kind]
    assert all(all(row) for row in rows(title))


def test_every_signal_has_its_line() -> None:
    told = {name for row in rows("Signals") for name in re.findall(r"SIG[A-Z]+", row[0])}
    assert {number.name for number in HANDLERS} <= told


def test_every_state_has_its_line() -> None:
    source = (Path(__file__).parents[3] / "daemon/colibri_daemon/supervisor/health.py").read_text()
    states = set(re.findall(r'"(starting|ready|degraded|draining|failed)"', source))
    assert {row[0] for row in rows("States")} == states


def test_settings_it_names_exist() -> None:
    named = set(re.findall(r"`([a-z]+_[a-z_]+)`", RUNBOOK))
    fields = {"retry_after_ms", "deadline_ms", "protocol_errors_total", "slow_reader_disconnects_total", "kv_slabs",
              "request_id"}
    assert named - fields <= SETTINGS.keys()
