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


@click.command()
@click.option("--isa", type=click.Choice(["ref", "avx2", "avx512"]), help="Only this instruction set.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@reporting
def selftest(isa: str | None, as_json: bool) -> int:
    """Compute the numerics fingerprint on every instruction set of this CPU and compare it with the one built in."""
    from . import selftest as module

    description = module.describe([module.run(name) for name in ([isa] if isa else module.available())])
    click.echo(json.dumps(description, indent=1) if as_json else module.table(description))
    return 0 if description["ok"] else 1


def _tokens_or_auto(context: click.Context, option: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value == "auto" or value.isascii() and value.isdigit():
        return value if value in (None, "auto") else int(value)
    raise click.BadParameter(f"{value!r} is neither a number of tokens nor auto")


def _attending(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options for what a query attends to."""
    for option in (
        click.option("--positions", type=click.Choice(["cache", "absolute"]), default="cache", show_default=True),
        click.option("--window", metavar="W|auto", callback=_tokens_or_auto, help="Sliding window; 0: everything."),
        click.option("--pinned", metavar="P|auto", callback=_tokens_or_auto, help="Tokens at the start always seen."),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("folder", metavar="DIR", type=_FOLDER)
@click.argument("file", type=_FOLDER)
@click.option("--tokens", "are_tokens", is_flag=True, help="FILE holds token ids (.npy, .npz or numbers as text).")
@click.option("--window-tokens", type=click.IntRange(0), help="Cut the text into windows of this many tokens; 0: one "
              "text. Default: 512, or one text when a --window is given.")
@click.option("--long", "window_tokens", flag_value=0, type=int, help="The same as --window-tokens 0.")
@click.option("--limit", type=click.IntRange(1), help="Only the first windows (tokens, if it is one text).")
@click.option("--second-half", is_flag=True, help="Score only the second half of each window.")
@_attending
@click.option("--threads", type=click.IntRange(1, 1024), help="Default: the usable physical cores.")
@click.option("--routing", type=click.Choice(["float", "int8"]), default="float", show_default=True)
@click.option("--compare-routing", is_flag=True, help="How often int8 routing picks the same experts, and its cost.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@reporting
def perplexity(folder: Path, file: Path, are_tokens: bool, compare_routing: bool, quiet: bool, as_json: bool,
               threads: int | None, routing: str, pinned: int | str | None, window: int | str | None,
               **cut: Any) -> None:
    """Measure how well the model in DIR predicts the text in FILE.

    Without --pinned and --window the model's own attention is used; auto is what the daemon would use.
    """
    from . import perplexity as module
    from .container import Manifest
    from .geometry import default_attention

    own = default_attention(Manifest.load(folder).geometry)
    pinned, window = (own[i] if value == "auto" else value for i, value in enumerate((pinned, window)))
    if pinned and not window:
        raise click.UsageError(f"--pinned {pinned} needs a --window (or auto)")
    if cut["window_tokens"] is None:
        cut["window_tokens"] = 0 if window else 512
    plan = module.Plan(pinned=pinned, window=window, **cut)
    tokens = module.load_tokens(file) if are_tokens else module.tokenise(folder, file)
    run = module.Run(folder, plan, plan.cut(file, tokens), threads, routing, None if quiet else sys.stderr)
    result, lines = run.compare() if compare_routing else run.measure()
    click.echo(json.dumps(result, indent=1) if as_json else lines)
