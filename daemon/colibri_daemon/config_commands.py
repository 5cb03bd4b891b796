"""colibrid check-config and config-reference: what a configuration means before anything is started with it."""

from __future__ import annotations

import grp
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from .common import memory, reference
from .common.arena import choose_slabs, longest_request
from .common.exit_codes import Exit
from .common.facts import ModelFacts
from .common.settings import SETTINGS, Settings, SettingsError, load_settings


@dataclass(frozen=True)
class Split:
    """Where memory goes, in bytes and slabs. longest: slabs of a request of max_len tokens; fitting: how many of those
    fit at once, of at most max_seqs in each worker."""

    available: int
    weights: int
    kv: int
    slabs: int
    slab_bytes: int
    longest: int
    fitting: int


@dataclass
class Report:
    settings: Settings | None = None
    facts: ModelFacts | None = None
    split: Split | None = None
    threads: int = 0  # of each worker
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "ok": not self.problems,
            "problems": self.problems,
            "warnings": self.warnings,
            "settings": {
                name: {"value": value, "from": settings.origin(name)}
                for name, value in settings.model_dump(mode="json").items()
            } if settings else {},
            "threads": self.threads,
            "model": self.facts.to_wire() if self.facts else None,
            "memory": asdict(self.split) if self.split else None,
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """For people; problems and warnings apart."""
        if self.settings:
            values = {name: setting.toml(getattr(self.settings, name)) for name, setting in SETTINGS.items()}
            width = max(map(len, values)), max(map(len, values.values()))
            for name, value in values.items():
                yield f"{name:{width[0]}} = {value:{width[1]}}  # {self.settings.origin(name)}"
        if self.facts:
            yield from _model_lines(self.facts, self.threads)
        if self.split:
            yield from _memory_lines(self.split)


def _model_lines(facts: ModelFacts, threads: int) -> Iterator[str]:
    sees = f"the first {facts.pinned} and the latest {facts.window} tokens" if facts.window else "the whole text"
    yield ""
    yield f"model: {facts.name}, {facts.architecture}, {facts.quantization}, id {facts.id}"
    yield f"attention: {sees}, {facts.positions} positions; up to {facts.max_len} tokens of prompt and output"
    yield f"workers: {threads} {'thread' if threads == 1 else 'threads'} each"


def _memory_lines(split: Split) -> Iterator[str]:
    from colibri_engine.convert.progress import human

    yield (f"memory: {human(split.available)} available; {human(split.weights)} weights, shared by all workers; "
           f"{human(split.kv)} KV cache")  # fmt: skip
    yield (f"KV cache: {split.slabs} slabs of {human(split.slab_bytes)}, shared by all workers; a request of full "
           f"length takes {split.longest}, {split.fitting} of them fit at once")  # fmt: skip


def examine(file: Path, environ: Mapping[str, str]) -> Report:
    """What ``colibrid serve --config FILE`` would start with in this environment, and all that would stop it."""
    report = Report()
    try:
        report.settings = settings = load_settings({}, environ, file)
    except SettingsError as e:
        report.problems += e.problems
        return report
    report.warnings += settings.warnings
    _examine_socket(settings, report)
    if settings.model is None:
        report.warnings.append("model is not set: serve needs it in the file, as COLIBRI_MODEL or as --model")
    else:
        _examine_model(settings, report)
    return report


def _examine_socket(settings: Settings, report: Report) -> None:
    if not settings.socket.parent.is_dir():
        report.warnings.append(f"socket: there is no folder {settings.socket.parent}; it must be there before serve is")
    group = settings.socket_group
    try:
        if group and not group.isdigit():
            grp.getgrnam(group)
    except KeyError:
        report.problems.append(f"{settings.origin('socket_group')}: socket_group: there is no group {group!r}")


def _examine_model(settings: Settings, report: Report) -> None:
    from colibri_engine.errors import ColibriError

    from .worker.check import check

    try:
        report.facts = facts = check(settings)
        report.split = split = _split(settings, facts)
        report.threads = _threads(settings, report)
    except (ColibriError, OSError, ValueError) as e:
        report.problems.append(f"model: {e}")
        return
    if split.weights + split.kv > split.available:
        report.warnings.append(f"weights and KV cache need {split.weights + split.kv} bytes and {split.available} are "
                               "available: lower kv_bytes or give the daemon more memory")  # fmt: skip
    if not split.fitting:
        report.warnings.append(f"a request of full length needs {split.longest} slabs, there are {split.slabs}: raise "
                               "kv_bytes or lower max_tokens_total")  # fmt: skip


def _threads(settings: Settings, report: Report) -> int:
    from colibri_engine.binding import lib

    cores = lib.colibri_host_threads()
    if warning := settings.crowding(cores):
        report.warnings.append(warning)
    return settings.threads_per_worker(cores)


def _split(settings: Settings, facts: ModelFacts) -> Split:
    free = memory.available()
    slabs, longest = choose_slabs(settings, facts, free), longest_request(settings, facts)
    return Split(
        available=free, weights=facts.weight_bytes, kv=slabs * facts.slab_bytes, slabs=slabs,
        slab_bytes=facts.slab_bytes, longest=longest,
        fitting=min(slabs // longest, settings.max_seqs * settings.workers),
    )  # fmt: skip


@click.command("check-config")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def check_config(file: Path, as_json: bool) -> None:
    """Tell whether "colibrid serve --config FILE" would start, and with what.

    Shows every setting with its source (COLIBRI_* variables count, as they would for serve) and, if a model is set,
    where memory would go. Exit codes: 0 it would start, 2 it would not.
    """
    report = examine(file, os.environ)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        for line in report.lines():
            click.echo(line)
        for warning in report.warnings:
            click.echo(f"warning: {warning}", err=True)
        for problem in report.problems:
            click.echo(f"error: {problem}", err=True)
    sys.exit(Exit.USAGE if report.problems else Exit.STOPPED)


@click.command("config-reference")
@click.option("--toml", is_flag=True, help="As a configuration file with every setting at its default.")
def config_reference(toml: bool) -> None:
    """Show every setting: its names, values, default and meaning."""
    click.echo(reference.example() if toml else reference.markdown(), nl=False)
