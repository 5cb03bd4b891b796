"""The engine's subcommands of colibrid. Exit codes: 0 all is well, 1 a check failed, 2 the command line or what it
names cannot be used, 130 interrupted."""

from __future__ import annotations

import functools
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from .errors import ColibriError
from .geometry import POLICY

_FORMATS = click.Choice(list(POLICY))
_FOLDER = click.Path(path_type=Path)
INTERRUPTED = 130


def reporting(command: Callable[..., int | None]) -> Callable[..., None]:
    """Turns a command's result or error into a message on stderr and an exit code; never a traceback for user errors.

    SIGTERM is treated as Ctrl-C, so that cleaning up happens in both cases.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        previous = signal.signal(signal.SIGTERM, _interrupt)
        try:
            code = command(*args, **kwargs) or 0
        except ColibriError as e:
            click.echo(f"error: {e}", err=True)
            code = 2
        except KeyboardInterrupt:
            click.echo("interrupted; nothing was left behind", err=True)
            code = INTERRUPTED
        finally:
            signal.signal(signal.SIGTERM, previous)
        sys.exit(code)

    return run


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _writing(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every command that writes a container."""
    for option in (
        click.option("--quiet", is_flag=True, help="No progress on stderr."),
        click.option("--force", is_flag=True, help="Replace DST if it is a model folder."),
        click.option("--format", "fmt", type=_FORMATS, default="q4", show_default=True, help="How weights are stored."),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("src", type=_FOLDER)
@click.argument("dst", type=_FOLDER)
@_writing
@click.option("--upcycle", type=click.IntRange(2, 16384), metavar="E", help="Make a dense SRC a mixture of E experts.")
@reporting
def convert(src: Path, dst: Path, fmt: str, force: bool, quiet: bool, upcycle: int | None) -> None:
    """Convert SRC, a Hugging Face folder or a GGUF file, into the model folder DST."""
    from .convert.pipeline import convert as run
    from .convert.progress import progress

    with progress("converting", quiet) as advance:
        report = run(src, dst, fmt, upcycle, force, advance)
    _written(dst, report, quiet)


@click.command("synth-model")
@click.argument("dst", type=_FOLDER)
@_writing
@click.option("--layers", type=int, default=2, show_default=True)
@click.option("--hidden", type=int, default=4096, show_default=True)
@click.option("--inter", type=int, default=14336, show_default=True, help="Inner size of an expert.")
@click.option("--heads", type=int, default=32, show_default=True)
@click.option("--kv-heads", type=int, default=8, show_default=True)
@click.option("--head-dim", type=int, default=128, show_default=True)
@click.option("--experts", type=int, default=8, show_default=True, help="1 makes a dense llama.")
@click.option("--top-k", type=int, default=2, show_default=True, help="Experts per token.")
@click.option("--vocab", type=int, default=32000, show_default=True)
@click.option("--context", type=int, default=32768, show_default=True, help="Trained length to claim.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@reporting
def synth_model(dst: Path, fmt: str, force: bool, quiet: bool, seed: int, **numbers: int) -> None:
    """Write a random-weight model of any geometry to DST, by default Mixtral-8x7B's with 2 layers."""
    from .convert.progress import progress
    from .convert.synth import synthesise
    from .geometry import Geometry, eps_bits

    numbers["top_k"] = min(numbers["top_k"], numbers["experts"])
    geometry = Geometry(**numbers, window=0, norm_eps_bits=eps_bits(1e-5), tied_head=0)
    with progress("writing", quiet) as advance:
        report = synthesise(dst, geometry, fmt, seed, force, advance)
    _written(dst, report, quiet)


def _written(dst: Path, report: Any, quiet: bool) -> None:
    from .convert.progress import human

    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    if not quiet:
        files = ", ".join(f"{name} {human(size)}" for name, size in report.manifest.files)
        speed = human(report.bytes / max(report.seconds, 1e-9))
        click.echo(
            f"{dst}: {files} in {report.seconds:.1f} s ({speed}/s), model id {report.manifest.model_id}", err=True
        )


@click.command()
@click.argument("folder", metavar="DIR", type=_FOLDER)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@reporting
def inspect(folder: Path, as_json: bool) -> None:
    """Show what is in the model folder DIR."""
    from .inspect import describe, table

    description = describe(folder)
    click.echo(json.dumps(description, indent=1) if as_json else table(description))


@click.command()
@click.argument("folder", metavar="DIR", type=_FOLDER)
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@reporting
def verify(folder: Path, quiet: bool) -> int:
    """Check every checksum, extent and value of the model folder DIR."""
    from .convert.progress import human, progress
    from .verify import stored_size
    from .verify import verify as run

    total, done = stored_size(folder), 0
    with progress("verifying", quiet) as advance:

        def count(n: int) -> None:
            nonlocal done
            done += n
            advance(done, total)

        findings = run(folder, count)
    for finding in findings:
        click.echo(f"error: {finding}", err=True)
    if not findings and not quiet:
        click.echo(f"{folder}: sound, {human(total)} checked")
    return 1 if findings else 0
