"""colibri-client as a whole: help, version, completion, where --socket may stand, errors of every kind."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from colibri_client.cli import main
from colibri_client.cli.app import COMMANDS
from colibri_client.cli.options import FIELDS, SPECS
from colibri_client.cli.target import REMEDIES, Target, described
from colibri_client.errors import ConnectionLost, TimeoutExceeded, class_of
from colibri_client.text import EXTRA
from colibri_protocol.errors import Code
from colibri_protocol.messages import Generate
from fixtures.command import Cli
from fixtures.little_daemon import LittleDaemon

ROOT = Path(__file__).resolve().parents[3]


def test_help_and_version(bare: Cli) -> None:
    text = bare("--help").out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert "Exit codes:" in text
    assert bare("--version").out == f"colibri-client, version {version('colibri-daemon')}\n"
    assert bare().code == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, bare: Cli) -> None:
    outcome = bare(name, "-h")
    assert outcome.code == 0
    assert "colibri-client " in outcome.out.partition("Example")[2]
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert command.name == name


def test_an_unknown_command(bare: Cli) -> None:
    assert "No such command 'nonsense'" in bare("nonsense").err


def test_options_have_the_protocol_s_words_and_ranges(bare: Cli) -> None:
    text = " ".join(bare("generate", "--help").out.split())
    assert all(f"--{name.replace('_', '-')}" in text for name in FIELDS)
    assert SPECS["top_p"].doc in text
    assert "[default: 256]" in text


@pytest.mark.parametrize("where", ["before", "after", "environment", "before wins", "after wins"])
def test_where_the_socket_may_be_named(where: str, bare: Cli, daemon: LittleDaemon) -> None:
    here, wrong = ["--socket", daemon.path], ["--socket", "/nowhere"]
    command = {"before": [*here, "health"], "after": ["health", *here], "environment": ["health"],
               "before wins": [*here, "health"], "after wins": [*wrong, "health", *here]}[where]
    environment = {"environment": str(daemon.path), "before wins": "/nowhere"}.get(where)
    assert bare(*command, env={"COLIBRI_SOCKET": environment} if environment else None).code == 0


def test_the_default_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLIBRI_SOCKET", "COLIBRI_MODEL"):
        monkeypatch.delenv(name, raising=False)
    assert Target.of(None, None) == Target("/run/colibri/colibri.sock", None)


def test_a_daemon_that_does_not_name_its_folder(bare: Cli, tmp_path: Path) -> None:
    with LittleDaemon(tmp_path / "s", None):
        outcome = bare("--socket", tmp_path / "s", "generate", "the")
        assert (outcome.code, "pass --model DIR" in outcome.err) == (2, True)
        outcome = bare("--socket", tmp_path / "s", "generate", "--tokens", "7", "--model-defaults")
        assert (outcome.code, "pass --model DIR" in outcome.err) == (2, True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, bare: Cli) -> None:
    assert "_COLIBRI_CLIENT_COMPLETE" in bare("completion", shell).out


def test_the_shell_gets_commands_and_options() -> None:
    program = Path(sys.executable).with_name("colibri-client")
    words = {"COMP_WORDS": "colibri-client gen", "COMP_CWORD": "1", "_COLIBRI_CLIENT_COMPLETE": "bash_complete"}
    result = subprocess.run([program], env=words, capture_output=True, text=True, check=False)
    assert result.stdout == "plain,generate\n"


@pytest.mark.parametrize("code", list(Code))
def test_every_error_code_is_described(code: Code) -> None:
    error = class_of(code)(code, "the message", field="tenant")
    text = described(error)
    assert text.startswith(f"{code.name} ({code.value}): the message (field tenant)")
    assert text.endswith(REMEDIES.get(code, "(field tenant)"))


def test_errors_without_a_code() -> None:
    assert described(TimeoutExceeded(2.0)).startswith("the daemon gives no answer within 2 s")
    assert described(ConnectionLost("it broke")) == "it broke"


def test_an_output_that_another_model_cannot_continue(cli: Cli, daemon: LittleDaemon) -> None:
    """It is there when the client comes back."""
    def once(message: Generate) -> list[int]:
        daemon.model = replace(daemon.model, id="d" * 64)
        return [200]

    daemon.output, daemon.dies = once, True
    outcome = cli("generate", "--tokens", "7", "--ids")
    assert (outcome.code, outcome.out) == (1, "200\n")
    assert "MODEL_MISMATCH" in outcome.err


def test_the_extra_that_errors_name_has_the_packages() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"tokenizers", "jinja2"} <= {requirement.partition(">")[0] for requirement in extras[EXTRA]}
