"""Manual pages from help texts: all that the programs have, and what groff makes of them."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest
from colibri_client.cli import main as client
from colibri_daemon.cli import main as daemon

SCRIPT = Path(__file__).resolve().parents[3] / "deploy" / "man.py"
PROGRAMS = {"colibrid": daemon, "colibri-client": client}
HELP = """\
Usage: tool [FLAGS]
       tool other NAME

Does a thing. It does
it well.

  .first 'example'
  back\\slash

More.

Where it answers:
  --listen ADDRESS    host:port, or
                      a path. Default: x.
  --a-very-long-flag-indeed KIND
                      Its text.
  --bare
"""


@pytest.fixture(scope="module")
def man() -> ModuleType:
    """deploy/man.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("deploy_man", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def names(program: str, command: click.Command) -> set[str]:
    """The pages there have to be for a command and what is below it."""
    found = {program}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            found |= names(f"{program}-{name}", inner)
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("man")
    programs = [Path(sys.executable).with_name(name) for name in (*PROGRAMS, "colibri-bench")]
    subprocess.run([sys.executable, SCRIPT, folder, *programs], check=True, stdout=subprocess.DEVNULL)
    return folder


def test_every_command_has_a_page(written: Path) -> None:
    wanted = {name for program, command in PROGRAMS.items() for name in names(program, command)} | {"colibri-bench"}
    assert {path.stem for path in written.iterdir()} == wanted


def test_every_option_is_in_it(written: Path) -> None:
    page = (written / "colibrid-serve.1").read_text().replace("\\-", "-")
    serve = daemon.get_command(click.Context(daemon), "serve")
    assert serve is not None
    options = [option for parameter in serve.params for option in parameter.opts if option.startswith("--")]
    assert len(options) > 30
    assert [option for option in options if f"\\fB{option}" not in page] == []


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs the package groff")
def test_groff_has_no_complaint(written: Path) -> None:
    pages = sorted(written.iterdir())
    done = subprocess.run(["groff", "-ww", "-z", "-K", "utf8", "-T", "utf8", "-man", *pages], capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert done.stderr == ""


def test_parse(man: ModuleType) -> None:
    found = man.parse(HELP)
    assert found.usage == ["tool [FLAGS]", "tool other NAME"]
    assert found.summary == "Does a thing"
    assert found.sections == {"Where it answers": [("--listen ADDRESS", "host:port, or a path. Default: x."),
                                                   ("--a-very-long-flag-indeed KIND", "Its text."), ("--bare", "")]}


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs the package groff")
def test_page(man: ModuleType) -> None:
    """What is written is read: no quote, dash or backslash is changed, no line is taken for a request."""
    page = man.page("tool-x", "1.0", man.parse(HELP), ["tool"])
    done = subprocess.run(["groff", "-K", "utf8", "-T", "utf8", "-P-c", "-man"], input=page, capture_output=True,
                          text=True, check=True)  # fmt: skip
    lines = [line.strip() for line in done.stdout.replace("\b", "").splitlines()]
    for line in (".first 'example'", "back\\slash", "Does a thing. It does it well.", "More."):
        assert line in lines


def test_what_is_no_help_is_refused(man: ModuleType) -> None:
    with pytest.raises(ValueError, match="Usage"):
        man.parse("error: no such command\n")
