"""The command line of colibrid plan."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from colibri_engine.container import Manifest
from colibri_engine.errors import ColibriError

from ..common import memory
from ..common.exit_codes import Exit
from ..common.facts import ModelFacts
from ..common.settings import Settings, click_options
from ..common.values import parse_size
from ..worker.check import check
from . import figures, surroundings
from .advice import Problem, problems
from .figures import Figure, Load, Speeds
from .need import need
from .probe import Question, probe

DOES_NOT_FIT = 1
_CLIENTS, _CONTEXT = click.IntRange(1, 1 << 20), click.IntRange(1, 1 << 24)


def _size(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_size(value)
    except ValueError as e:
        raise click.BadParameter(f"{e}; bytes or a size such as 64G is") from None


@click.command()
@click.option("--ram", callback=_size, metavar="SIZE", help="Memory the daemon may take, as in 64G. Default: what is "
              "available here.")
@click.option("--clients", type=_CLIENTS, default=1, show_default=True, help="Requests at the same time.")
@click.option("--context", type=_CONTEXT, help="Tokens of each, prompt and output. Default: 2048, or the model's most.")
@click.option("--no-speed", is_flag=True, help="Only memory: nothing is timed.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click_options
def plan(settings: Settings, ram: int | None, clients: int, context: int | None, no_speed: bool,
         as_json: bool) -> None:
    """Tell what a machine with so much memory can serve, before it does.

    Takes the flags, COLIBRI_* variables and configuration file that serve takes. Shows where memory goes, how many
    requests fit, how fast they will be, and what does not fit, with the formula beside each figure. Speed is predicted
    for this machine, from steps of a part of the model that are timed for some seconds: leave the machine alone
    meanwhile. Exit codes: 0 it fits, 1 something does not, 2 it cannot be planned.
    """
    try:
        sections, found = _plan(settings, ram, clients, context, not no_speed)
    except (ColibriError, OSError, ValueError) as e:
        click.echo(f"error: {e}", err=True)
        sys.exit(Exit.USAGE)
    if as_json:
        document: dict[str, Any] = {name: figures.finite(rows) for name, rows in sections.items()}
        click.echo(json.dumps(document | {"problems": [one._asdict() for one in found]}, indent=1))
    else:
        click.echo("\n".join(_lines(sections, found)))
    sys.exit(DOES_NOT_FIT if found else 0)


def _plan(settings: Settings, ram: int | None, clients: int, context: int | None,
          speed: bool) -> tuple[dict[str, list[Figure]], list[Problem]]:  # fmt: skip
    from colibri_engine.binding import lib

    if settings.model is None:
        raise ValueError("model: is not set; give --model DIR")
    facts, cores = check(settings), lib.colibri_host_threads()
    threads, length = settings.threads_per_worker(cores), context or min(2048, facts.max_len)
    needed = need(settings, facts, memory.available() if ram is None else ram, length, threads,
                  surroundings.measure(settings))
    running = min(clients, needed.slabs // needed.request_slabs, settings.max_seqs * settings.workers)
    load = Load(clients, length, running, settings.workers, threads)
    sections = {"memory": list(figures.memory(needed, settings)),
                "requests": list(figures.requests(needed, facts, load, settings))}  # fmt: skip
    if speed:
        sections["speed"] = list(_speed(settings, facts, load).figures())
    found = list(problems(needed, facts, load, settings))
    if threads * settings.workers > cores:
        found.append(Problem(f"workers x threads is {threads * settings.workers}, here are {cores} cores: speed as "
                             "predicted is that of this machine", "run it where it is to serve"))  # fmt: skip
    return sections, found


def _speed(settings: Settings, facts: ModelFacts, load: Load) -> Speeds:
    depth = min(load.context, facts.pinned + facts.window) if facts.window else load.context
    question = Question(facts, load.threads, load.workers, load.streams, depth)
    return Speeds(facts, Manifest.load(Path(facts.folder)), load, probe(question), depth, settings)


def _lines(sections: dict[str, list[Figure]], found: list[Problem]) -> Iterator[str]:
    for name, rows in sections.items():
        yield name.upper()
        for f in rows:
            yield f"  {f.label:28}{f.shown:>14}   {f.formula}"
        yield ""
    yield "WHAT DOES NOT FIT" if found else "Everything fits."
    for what, remedy in found:
        yield f"  {what}"
        yield f"    remedy: {remedy}"
