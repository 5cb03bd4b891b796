"""What the daemon itself costs: an open-loop load of many small requests on a model too small to matter.

    python loadtest/overhead.py --rate 1000 --seconds 20

Requests are sent at times fixed beforehand whether or not earlier ones have ended, and a latency counts from the
scheduled time, so a generator or a daemon that falls behind shows. CPU is read from /proc for each process, in cores.
This is an overhead test: its rates say nothing about real models.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import uvloop
from colibri_client import AsyncClient, errors

TICKS = os.sysconf("SC_CLK_TCK")
BIN = Path(sys.executable).parent
GEOMETRY = {"layers": 1, "hidden": 128, "inter": 256, "heads": 4, "kv-heads": 2, "head-dim": 32, "vocab": 1024,
            "context": 2048}


@dataclass
class Run:
    """latencies: seconds from the scheduled time to the end of each finished request."""

    latencies: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)
    tokens: int = 0
    failures: dict[str, int] = field(default_factory=dict)


def make_model(folder: Path) -> Path:
    model = folder / "one-layer"
    sizes = [part for name, value in GEOMETRY.items() for part in (f"--{name}", str(value))]
    subprocess.run([BIN / "colibrid", "synth-model", model, "--format", "q8", "--quiet", *sizes], check=True)
    return model


@contextmanager
def daemon(model: Path, folder: Path, workers: int, threads: int) -> Iterator[tuple[Path, int]]:
    """A running daemon: its socket and the supervisor's pid."""
    socket = folder / "s"
    process = subprocess.Popen([BIN / "colibrid", "serve", "--model", model, "--socket", socket, "--workers",
                                str(workers), "--threads", str(threads), "--log-level", "warning"])
    try:
        subprocess.run([BIN / "colibri-client", "--socket", socket, "health", "--wait", "30"], check=True,
                       stdout=subprocess.DEVNULL)
        yield socket, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def processes(supervisor: int) -> dict[str, int]:
    """Role, as ps shows it, → pid."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return {_role(pid): pid for pid in (supervisor, *map(int, children))}


def _role(pid: int) -> str:
    title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    return title.removeprefix("colibrid: ")


async def one(client: AsyncClient, run: Run, at: float, prompt: list[int], tokens: int) -> None:
    run.lateness.append(time.monotonic() - at)
    try:
        first = True
        async for _ in client.generate(prompt, max_tokens=tokens, ignore_eos=True):
            if first:
                run.first.append(time.monotonic() - at)
                first = False
            run.tokens += 1
    except errors.ColibriError as e:
        name = getattr(e, "name", type(e).__name__)
        run.failures[name] = run.failures.get(name, 0) + 1
        return
    run.latencies.append(time.monotonic() - at)


async def drive(socket: Path, plan: dict[str, Any]) -> tuple[Run, float]:
    """Sends the whole schedule. Returns the run and how long it took."""
    rng, run = random.Random(plan["seed"]), Run()
    clients = [AsyncClient(str(socket), retries=0) for _ in range(plan["connections"])]
    for client in clients:
        await client.connect()
    begin, due, tasks, sent = time.monotonic(), 0.0, set(), 0
    while True:
        due += rng.expovariate(plan["rate"]) if plan["poisson"] else 1 / plan["rate"]
        if due > plan["seconds"]:
            break
        if (wait := begin + due - time.monotonic()) > 0.0005:
            await asyncio.sleep(wait)
        prompt = [rng.randrange(3, GEOMETRY["vocab"]) for _ in range(plan["prompt"])]
        task = asyncio.ensure_future(one(clients[sent % len(clients)], run, begin + due, prompt, plan["tokens"]))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        sent += 1
    while tasks:
        await asyncio.wait(set(tasks))
    elapsed = time.monotonic() - begin
    for client in clients:
        await client.close()
    return run, elapsed


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def measure(socket: Path, supervisor: int, plan: dict[str, Any]) -> dict[str, Any]:
    found = processes(supervisor)
    before = {role: cpu_seconds(pid) for role, pid in found.items()}
    own = resource.getrusage(resource.RUSAGE_SELF)
    run, elapsed = uvloop.run(drive(socket, plan))
    mine = resource.getrusage(resource.RUSAGE_SELF)
    cores = {role: (cpu_seconds(pid) - before[role]) / elapsed for role, pid in found.items()}
    cores["generator"] = (mine.ru_utime + mine.ru_stime - own.ru_utime - own.ru_stime) / elapsed
    spread = {f"p{p}": 1000 * percentile(run.latencies, p / 100) for p in (50, 95, 99)}
    return {
        "plan": plan,
        "requests_ok": len(run.latencies),
        "failures": run.failures,
        "requests_per_s": len(run.latencies) / elapsed,
        "tokens_per_s": run.tokens / elapsed,
        "latency_ms": spread,
        "ttft_ms": {f"p{p}": 1000 * percentile(run.first, p / 100) for p in (50, 95, 99)},
        "generator_lateness_ms_p99": 1000 * percentile(run.lateness, 0.99),
        "cores": cores,
        "dispatcher_us_per_token": 1e6 * cores["dispatcher"] * elapsed / max(run.tokens, 1),
    }


def show(result: dict[str, Any]) -> str:
    plan, ms = result["plan"], result["latency_ms"]
    lines = [
        f"overhead test: {plan['rate']:g} requests/s x {plan['seconds']:g} s, {plan['prompt']} prompt tokens, "
        f"{plan['tokens']} output tokens, one-layer model",
        f"  done {result['requests_ok']} ({result['requests_per_s']:.0f}/s, {result['tokens_per_s']:.0f} tokens/s), "
        f"failed {sum(result['failures'].values())} {result['failures'] or ''}",
        f"  end to end ms: p50 {ms['p50']:.1f}  p95 {ms['p95']:.1f}  p99 {ms['p99']:.1f};  first token p95 "
        f"{result['ttft_ms']['p95']:.1f};  generator late p99 {result['generator_lateness_ms_p99']:.1f}",
        "  cores: " + "  ".join(f"{role} {share:.2f}" for role, share in result["cores"].items()),
        f"  dispatcher: {result['dispatcher_us_per_token']:.1f} us per token, requests included",
    ]
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--rate", type=click.FloatRange(1), default=1000, help="Requests per second.")
@click.option("--seconds", type=click.FloatRange(0.1), default=20, help="How long to send.")
@click.option("--prompt", type=click.IntRange(1), default=16, help="Prompt tokens.")
@click.option("--tokens", type=click.IntRange(1), default=8, help="Output tokens.")
@click.option("--connections", type=click.IntRange(1, 64), default=4)
@click.option("--workers", type=click.IntRange(1), default=1)
@click.option("--threads", type=click.IntRange(1), default=1, help="Engine threads of a worker.")
@click.option("--poisson", is_flag=True, help="Exponential gaps instead of equal ones.")
@click.option("--seed", type=int, default=0, help="Of arrivals and prompts.")
@click.option("--json", "as_json", is_flag=True)
def main(workers: int, threads: int, as_json: bool, **plan: Any) -> None:
    """Measure the daemon's own cost under an open-loop load of small requests."""
    with tempfile.TemporaryDirectory(prefix="colibri-") as name:
        folder = Path(name)
        with daemon(make_model(folder), folder, workers, threads) as (socket, pid):
            result = measure(socket, pid, plan)
    click.echo(json.dumps(result, indent=1) if as_json else show(result))


if __name__ == "__main__":
    main()
