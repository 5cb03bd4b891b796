"""Drives one server with a scenario and reports what a client saw.

    python loadtest/drive.py run chat /run/colibri/colibri.sock
    python loadtest/drive.py run loadtest/scenarios/rag.toml http://127.0.0.1:8080 --model NAME --html rag.html
    python loadtest/drive.py page a.json b.json --html both.html
    python loadtest/drive.py compare build/load/load-closed16-smol-q4.json loadtest/baselines/load-closed16-smol-q4.json
    python loadtest/drive.py capacity

A target that begins with http is any server with OpenAI's /v1/completions that takes token ids; any other is the
daemon's socket. loadtest/README.md says what scenarios can ask for and what the figures mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import click
import uvloop
from colibri_client import errors
from load import baseline, page, report
from load.canned import serving
from load.over_http import VOCAB, OverHttp
from load.over_socket import OverSocket
from load.runner import RequestError, Transport, drive
from load.scenario import ScenarioError, load
from rich.console import Console

HELP = {"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 120}
FILE = click.Path(path_type=Path, dir_okay=False)
BUSY = {"requests": 400, "warmup": 0, "prompt": {"kind": "fixed", "tokens": 64},
        "output": {"kind": "fixed", "tokens": 64}}  # fmt: skip


def transport(target: str, **http: Any) -> Transport:
    """For a URL or the path of a socket."""
    return OverHttp(target, **http) if target.startswith(("http://", "https://")) else OverSocket(Path(target))


@click.group(context_settings=HELP)
def main() -> None:
    """Load a server and report what its clients see."""


@main.command()
@click.argument("scenario")
@click.argument("target")
@click.option("--requests", type=click.IntRange(1), help="Instead of what the scenario says.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="Instead of what the scenario says.")
@click.option("--seed", type=click.IntRange(0), help="Instead of what the scenario says.")
@click.option("--model", help="HTTP: the model's name; default: the first that the server lists.")
@click.option("--key", envvar="LOADTEST_API_KEY", help="HTTP: bearer token; or $LOADTEST_API_KEY.")
@click.option("--vocab", type=click.IntRange(2), default=VOCAB, help="HTTP: prompts are ids below this.")
@click.option("--extra", default="{}", metavar="JSON", help="HTTP: more fields of the body; null removes one.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=600.0, help="Seconds; for one request.")
@click.option("--label", help="Name of this run in table and page; default: the target.")
@click.option("--json", "json_path", type=FILE, help="Write figures and every request.")
@click.option("--html", type=FILE, help="Write a page with plots.")
def run(scenario: str, target: str, timeout: float, label: str | None, json_path: Path | None, html: Path | None,
        requests: int | None, seconds: float | None, seed: int | None, extra: str, **http: Any) -> None:
    """Drive TARGET (URL or socket) with SCENARIO (a file, or chat, rag, mlperf, long, burst, closed16)."""
    try:
        asked = load(scenario, requests=requests, seconds=seconds, seed=seed)
        server = transport(target, extra=_fields(extra), **http)
        made = report.result(label or target, asked, uvloop.run(drive(server, asked, timeout=timeout)))
    except (ScenarioError, RequestError, errors.ColibriError, aiohttp.ClientError, OSError) as e:
        raise click.ClickException(str(e)) from e
    report.show(Console(), [made])
    if json_path:
        report.write(json_path, made)
    if html:
        page.write(html, [made])
    if made["figures"]["failed"]:
        raise SystemExit(1)


def _fields(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as e:
        raise click.BadParameter(f"{e}; give a JSON object, such as '{{\"top_k\": 1}}'", param_hint="--extra") from e
    if not isinstance(found, dict):
        raise click.BadParameter("is no JSON object", param_hint="--extra")
    return found


@main.command("page")
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--html", type=FILE, required=True)
def make_page(results: tuple[Path, ...], html: Path) -> None:
    """One page of the RESULTS that run --json wrote."""
    page.write(html, [json.loads(path.read_text(encoding="utf-8")) for path in results])


@main.command("baseline")
@click.argument("result", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("out", type=FILE)
def make_baseline(result: Path, out: Path) -> None:
    """Write the ratios of RESULT (of make bench or make load) as baseline OUT."""
    measured = _ratios(result)
    baseline.write(out, measured.what, measured.pairs, measured.ratios)


@main.command()
@click.argument("result", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("against", metavar="BASELINE", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--tolerance", type=click.FloatRange(0), default=baseline.TOLERANCE, help="0.1: ten per cent.")
def compare(result: Path, against: Path, tolerance: float) -> None:
    """Say which ratios of RESULT are worse than in BASELINE by more than the tolerance; that is an error."""
    try:
        before, now = baseline.read(against), _ratios(result)
    except baseline.BaselineError as e:
        raise click.ClickException(str(e)) from e
    found = baseline.worse(before.ratios, now.ratios, tolerance)
    for line in found:
        click.echo(line)
    click.echo(f"{len(found)} of {len(before.ratios)} ratios worse than {against} ({before.machine}) by more than "
               f"{tolerance:.0%}")  # fmt: skip
    if found:
        raise SystemExit(1)


def _ratios(result: Path) -> baseline.Measured:
    try:
        return baseline.measured(result)
    except baseline.BaselineError as e:
        raise click.ClickException(str(e)) from e


@main.command()
@click.option("--clients", type=click.IntRange(1), default=16)
def capacity(clients: int) -> None:
    """What this generator itself can do over HTTP: against a server, in a process of its own, that answers at once."""
    asked = load("closed16", **BUSY, arrival={"kind": "closed", "clients": clients})
    with serving(tokens=64) as url:
        made = report.result("answers at once", asked, uvloop.run(drive(OverHttp(url), asked)))
    figures = made["figures"]
    report.show(Console(), [made])
    each = 1e6 * figures["generator"]["cores"] * figures["seconds"] / figures["output_tokens"]
    click.echo(f"{each:.1f} us of CPU per token")


if __name__ == "__main__":
    main()
