"""colibri-client admin."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from colibri_client.cli.admin import admin
from colibri_protocol.errors import Code
from colibri_protocol.message import Message
from colibri_protocol.messages import (
    AdminDrain,
    AdminDump,
    AdminEvict,
    AdminLogLevel,
    AdminReload,
    AdminReply,
    AdminResume,
    Error,
)
from fixtures.command import Cli
from fixtures.little_daemon import LittleDaemon

TOLD = {"generation": 3, "seconds": 1.25, "live": 4, "slabs": 9, "processes": ["worker 0", "worker 1"]}
CALLS: list[tuple[list[str], Message, str]] = [
    (["reload"], AdminReload(), "generation 3 serves after 1.2 s\n"),
    (["reload", "--everything", "--timeout", "9"], AdminReload(everything=True), "generation 3 serves after 1.2 s\n"),
    (["drain"], AdminDrain(), "draining, 4 requests are live\n"),
    (["resume"], AdminResume(), "requests are taken again\n"),
    (["evict"], AdminEvict(), "9 slabs became free\n"),
    (["evict", "--uid", "5", "--tenant", "acme"], AdminEvict(uid=5, tenant="acme"), "9 slabs became free\n"),
    (["log-level", "debug"], AdminLogLevel(level="debug"), "debug: worker 0, worker 1\n"),
    (["log-level", "info", "--role", "worker"], AdminLogLevel(level="info", role="worker"),
     "info: worker 0, worker 1\n"),
]


@pytest.fixture
def root(bare: Cli, daemon: LittleDaemon) -> Cli:
    """Runs admin commands; the little daemon's socket is its admin socket too."""
    daemon.admin = AdminReply(ok=True, result=json.dumps(TOLD).encode())
    return lambda command, *words, **more: bare("admin", command, "--admin-socket", daemon.path, *words, **more)


@pytest.mark.parametrize(("words", "message", "said"), CALLS, ids=[" ".join(words) for words, _, _ in CALLS])
def test_commands(root: Cli, daemon: LittleDaemon, words: list[str], message: Message, said: str) -> None:
    outcome = root(*words)
    assert (outcome.code, outcome.out, outcome.err) == (0, said, "")
    assert daemon.last(type(message)) == message
    assert root(*words, "--json").json == TOLD


def test_dump(root: Cli, daemon: LittleDaemon) -> None:
    outcome = root("dump")
    assert (outcome.code, json.loads(outcome.out)) == (0, TOLD)
    assert daemon.count(AdminDump) == 1


def test_where_the_socket_is(bare: Cli, daemon: LittleDaemon, model_folder: Path) -> None:
    with LittleDaemon(Path(f"{daemon.path}.admin"), model_folder) as beside:
        assert bare("--socket", daemon.path, "admin", "resume").code == 0
        assert bare("admin", "resume", "--socket", daemon.path).code == 0
        assert bare("admin", "resume", env={"COLIBRI_ADMIN_SOCKET": str(beside.path)}).code == 0
        assert beside.count(AdminResume) == 3
        assert daemon.count(AdminResume) == 0


def test_what_could_not_be_done(root: Cli, daemon: LittleDaemon) -> None:
    daemon.admin = AdminReply(ok=False, error="model: is not set")
    outcome = root("reload")
    assert (outcome.code, outcome.out, outcome.err) == (1, "", "error: model: is not set\n")
    assert root("reload", "--json").json == {"error": {"type": "AdminFailed", "message": "model: is not set"}}


def test_not_the_admin_socket(root: Cli, daemon: LittleDaemon) -> None:
    daemon.admin = Error(code=Code.PERMISSION, message="ADMIN_DRAIN is for the daemon's admin socket only")
    outcome = root("drain")
    assert (outcome.code, "admin socket only" in outcome.err) == (1, True)


def test_nobody_there(bare: Cli, tmp_path: Path) -> None:
    outcome = bare("--socket", tmp_path / "s", "admin", "drain")
    assert outcome.code == 3
    assert f"{tmp_path}/s.admin: there is no socket here" in outcome.err


@pytest.mark.parametrize("words", [
    ["evict", "--uid", "-1"], ["evict", "--uid", "x"], ["log-level"], ["log-level", "loud"],
    ["reload", "--timeout", "0"], ["shutdown"],
], ids=" ".join)  # fmt: skip
def test_bad_command_lines(bare: Cli, words: list[str]) -> None:
    assert bare("admin", *words).code == 2


@pytest.mark.parametrize("name", [None, *admin.commands])
def test_help_is_complete(bare: Cli, name: str | None) -> None:
    text = bare("admin", *[name] * (name is not None), "--help").out
    assert "Example" in text
    assert name is None or ("Exit codes:" in text and "--json" in text and "--admin-socket" in text)
    assert max(map(len, text.splitlines())) <= 120
    assert name is not None or "..." not in text.partition("Commands:")[2], "a summary does not fit into the list"


@pytest.mark.parametrize(("words", "expected"), [
    (["admin", "lo"], "log-level"), (["admin", "log-level", ""], "debug info warning error"),
    (["admin", "log-level", "info", "--role", "w"], "worker"), (["admin", "evict", "--u"], "--uid"),
])  # fmt: skip
def test_the_shell_completes(words: list[str], expected: str) -> None:
    program = Path(sys.executable).with_name("colibri-client")
    environ = {"COMP_WORDS": " ".join(["colibri-client", *words]), "COMP_CWORD": str(len(words)),
               "_COLIBRI_CLIENT_COMPLETE": "bash_complete"}
    result = subprocess.run([program], env=environ, capture_output=True, text=True, check=True)
    assert [line.removeprefix("plain,") for line in result.stdout.splitlines()] == expected.split()
