"""A little daemon on a real socket in a thread, and colibri-client run against it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from colibri_client.cli import main
from fixtures.command import Cli, Outcome
from fixtures.little_daemon import LittleDaemon
from fixtures.tokenizers_made import write_folder


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer with a chat template: token 5 + i is the i-th character of its alphabet."""
    return write_folder(tmp_path / "model", "byte_level")


@pytest.fixture
def daemon(model_folder: Path) -> Iterator[LittleDaemon]:
    with tempfile.TemporaryDirectory(prefix="colibri-") as folder, LittleDaemon(Path(folder) / "s", model_folder) as it:
        yield it


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs colibri-client with nothing in its environment."""
    for name in ("COLIBRI_SOCKET", "COLIBRI_MODEL"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object, stdin: str | bytes | None = None, env: dict[str, str] | None = None) -> Outcome:
        result = CliRunner().invoke(main, [str(a) for a in arguments], stdin, env, prog_name="colibri-client")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def cli(daemon: LittleDaemon, bare: Cli) -> Cli:
    """The same, with --socket."""

    def run(*arguments: object, **more: Any) -> Outcome:
        return bare("--socket", daemon.path, *arguments, **more)

    return run
