"""What the daemon itself costs: an open-loop load of many small requests on a model too small to matter.

    python loadtest/overhead.py --rate 1000 --seconds 10

This is an overhead test: its rates and latencies say nothing about real models. Requests are sent at times fixed
beforehand whether or not earlier ones have ended, and a latency counts from the scheduled time, so a generator or a
daemon that falls behind shows.

CPU is read from /proc for each process, kernel included. The client and the generator are one process; what the
generator takes is measured apart, with a client that answers at once. Each run is two loads at the same rate, of one
token per request and of --tokens: from their difference comes what a token costs, the rest is the request's. Numbers
are medians over --runs; on a busy machine processes wake less often and find more to do, so costs are then lower.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import click
import uvloop
from colibri_client import AsyncClient, errors

TICKS = os.sysconf("SC_CLK_TCK")
BIN = Path(sys.executable).parent
GEOMETRY = {"layers": 1, "hidden": 128, "inter": 256, "heads": 4, "kv-heads": 2, "head-dim": 32, "vocab": 1024,
            "context": 2048}
LONGER = 16  # times the tokens, in the load of long requests
QUEUE_REQUESTS = 4096  # whoever falls behind shows as latency, not as refusals


@dataclass(frozen=True)
class Plan:
    """rate: requests per second. prompt, tokens: of each request. poisson: exponential gaps instead of equal ones."""

    rate: float
    seconds: float
    prompt: int
    tokens: int
    connections: int
    poisson: bool
    seed: int


@dataclass
class Run:
    """Seconds from the scheduled time: latencies to the end, first to the first token, lateness to the sending.
    elapsed: seconds in all."""

    latencies: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)
    tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    elapsed: float = 0.0


class Generates(Protocol):
    """What is needed of a client."""

    def generate(self, tokens: bytes, *, max_tokens: int, ignore_eos: bool) -> AsyncIterator[int]: ...


class Instant:
    """Answers at once: what is measured with it is the generator."""

    async def generate(self, tokens: bytes, *, max_tokens: int, ignore_eos: bool) -> AsyncIterator[int]:
        for token in range(max_tokens):
            yield token


# ---- the daemon ----------------------------------------------------------------------------------------------------


def make_model(folder: Path) -> Path:
    model = folder / "one-layer"
    sizes = [part for name, value in GEOMETRY.items() for part in (f"--{name}", str(value))]
    subprocess.run([BIN / "colibrid", "synth-model", model, "--format", "q8", "--quiet", *sizes], check=True)
    return model


@contextmanager
def daemon(model: Path, folder: Path, workers: int, threads: int, **more: object) -> Iterator[tuple[Path, int]]:
    """A running daemon: its socket and the supervisor's pid. It trusts this user, as it would a gateway's. more: other
    settings."""
    socket = folder / "s"
    settings = {"model": model, "socket": socket, "workers": workers, "threads": threads, "log-level": "warning",
                "trusted-uids": os.getuid(), "queue-requests": QUEUE_REQUESTS, "queue-tokens": 1 << 20}
    settings |= {name.replace("_", "-"): value for name, value in more.items()}
    process = subprocess.Popen([BIN / "colibrid", "serve", *(f"--{name}={value}" for name, value in settings.items())])
    try:
        subprocess.run([BIN / "colibri-client", "--socket", socket, "health", "--wait", "30"], check=True,
                       stdout=subprocess.DEVNULL)
        yield socket, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def processes(supervisor: int) -> dict[str, int]:
    """Role, as ps shows it, → pid."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return {_role(pid): pid for pid in (supervisor, *map(int, children))}


def _role(pid: int) -> str:
    title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    return title.removeprefix("colibrid: ")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def own_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# ---- the load ------------------------------------------------------------------------------------------------------


def schedule(plan: Plan) -> list[tuple[float, bytes]]:
    """When each request is due, in seconds from the start, and its prompt."""
    rng, due, made = random.Random(plan.seed), 0.0, []
    while True:
        due += rng.expovariate(plan.rate) if plan.poisson else 1 / plan.rate
        if due > plan.seconds:
            return made
        ids = (rng.randrange(3, GEOMETRY["vocab"]) for _ in range(plan.prompt))
        made.append((due, b"".join(i.to_bytes(4, "little") for i in ids)))


async def one(client: Generates, run: Run, at: float, prompt: bytes, tokens: int) -> None:
    """One request, due at a time of the monotonic clock."""
    run.lateness.append(time.monotonic() - at)
    received = 0
    try:
        async for _ in client.generate(prompt, max_tokens=tokens, ignore_eos=True):
            if not received:
                run.first.append(time.monotonic() - at)
            received += 1
    except errors.ColibriError as e:
        run.failures[getattr(e, "name", type(e).__name__)] += 1
    else:
        run.latencies.append(time.monotonic() - at)
    run.tokens += received


async def drive(clients: Sequence[Generates], plan: Plan) -> Run:
    """Sends the whole schedule and waits for the last answer."""
    run, tasks, begin = Run(), set(), time.monotonic()
    for number, (due, prompt) in enumerate(schedule(plan)):
        if (wait := begin + due - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        task = asyncio.ensure_future(one(clients[number % len(clients)], run, begin + due, prompt, plan.tokens))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    while tasks:
        await asyncio.wait(set(tasks))
    run.elapsed = time.monotonic() - begin
    return run


async def drive_daemon(socket: Path, plan: Plan) -> Run:
    clients = [AsyncClient(socket, retries=0) for _ in range(plan.connections)]
    for client in clients:
        await client.connect()
    try:
        return await drive(clients, plan)
    finally:
        for client in clients:
            await client.close()


# ---- the numbers ---------------------------------------------------------------------------------------------------


def generator_cpu(plan: Plan) -> float:
    """CPU seconds that the generator takes of its own."""
    begin = own_cpu_seconds()
    uvloop.run(drive([Instant()], plan))
    return own_cpu_seconds() - begin


def measure(socket: Path, supervisor: int, plan: Plan) -> tuple[Run, dict[str, float]]:
    """One load, and the CPU seconds each process took for it."""
    generator = generator_cpu(plan)
    found = processes(supervisor)
    before, own = {role: cpu_seconds(pid) for role, pid in found.items()}, own_cpu_seconds()
    run = uvloop.run(drive_daemon(socket, plan))
    cpu = {role: cpu_seconds(pid) - before[role] for role, pid in found.items()}
    return run, cpu | {"client": own_cpu_seconds() - own - generator, "generator": generator}


def measure_pair(socket: Path, supervisor: int, plan: Plan) -> dict[str, Any]:
    """One run: the load of plan, and by comparison with long requests what a token costs without its request."""
    long_plan = replace(plan, rate=plan.rate / LONGER, tokens=plan.tokens * LONGER)
    (run, cpu), (long, long_cpu) = (measure(socket, supervisor, p) for p in (plan, long_plan))
    with_requests, long_requests = ({role: 1e6 * seconds / max(r.tokens, 1) for role, seconds in used.items()}
                                    for r, used in ((run, cpu), (long, long_cpu)))  # fmt: skip
    return {
        "load": {"requests": len(run.latencies), "tokens": run.tokens},
        "long_load": {"requests": len(long.latencies), "tokens": long.tokens},
        "failures": dict(run.failures + long.failures),
        "requests_per_s": len(run.latencies) / run.elapsed,
        "tokens_per_s": run.tokens / run.elapsed,
        "latency_ms": _spread_ms(run.latencies),
        "ttft_ms": _spread_ms(run.first),
        "generator_lateness_ms": _spread_ms(run.lateness),
        "cores": {role: seconds / run.elapsed for role, seconds in cpu.items()},
        "us_per_token_with_requests": with_requests,
        "us_per_token": {role: (LONGER * long_requests[role] - us) / (LONGER - 1)
                         for role, us in with_requests.items()},
    }  # fmt: skip


def _spread_ms(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [float("nan")]
    return {f"p{p}": 1000 * ordered[min(p * len(ordered) // 100, len(ordered) - 1)] for p in (50, 95, 99)}


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every number; failures are added up."""
    made: dict[str, Any] = {}
    for name, value in runs[0].items():
        values = [run[name] for run in runs]
        if name == "failures":
            made[name] = dict(sum(map(Counter, values), Counter()))
        else:
            made[name] = median(values) if isinstance(value, dict) else statistics.median(values)
    return made


def show(plan: Plan, result: dict[str, Any], runs: int) -> str:
    ms, failed = result["latency_ms"], result["failures"]
    lines = [
        f"overhead test (one-layer model; says nothing about real ones): {plan.rate:g} requests/s for {plan.seconds:g} "
        f"s, {plan.prompt} prompt tokens, {plan.tokens} output tokens, median of {runs}",
        f"  done {result['requests_per_s']:.0f} requests/s, {result['tokens_per_s']:.0f} tokens/s; failed "
        f"{sum(failed.values())} {failed or ''}",
        f"  end to end ms: p50 {ms['p50']:.1f}  p95 {ms['p95']:.1f}  p99 {ms['p99']:.1f};  first token p95 "
        f"{result['ttft_ms']['p95']:.1f};  generator late p99 {result['generator_lateness_ms']['p99']:.1f}",
        f"  {'process':<12}{'cores':>8}{'us/token, requests included':>30}{'without (estimate)':>20}",
    ]
    lines += [f"  {role:<12}{cores:>8.3f}{result['us_per_token_with_requests'][role]:>30.1f}"
              f"{result['us_per_token'][role]:>20.1f}" for role, cores in result["cores"].items()]  # fmt: skip
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--rate", type=click.FloatRange(1), default=1000, help="Requests per second.")
@click.option("--seconds", type=click.FloatRange(0.1), default=10, help="How long to send, in each of the two loads.")
@click.option("--prompt", type=click.IntRange(1), default=16, help="Prompt tokens.")
@click.option("--tokens", type=click.IntRange(1), default=8, help="Output tokens.")
@click.option("--connections", type=click.IntRange(1, 64), default=1)
@click.option("--workers", type=click.IntRange(1), default=1)
@click.option("--threads", type=click.IntRange(1), default=1, help="Engine threads of a worker.")
@click.option("--poisson", is_flag=True, help="Exponential gaps instead of equal ones.")
@click.option("--seed", type=int, default=0, help="Of arrivals and prompts.")
@click.option("--runs", type=click.IntRange(1), default=3, help="Medians are over so many.")
@click.option("--json", "as_json", is_flag=True)
def main(workers: int, threads: int, runs: int, as_json: bool, **load: Any) -> None:
    """Measure the daemon's own cost under an open-loop load of small requests."""
    plan = Plan(**load)
    with tempfile.TemporaryDirectory(prefix="colibri-") as name:
        folder = Path(name)
        with daemon(make_model(folder), folder, workers, threads) as (socket, pid):
            measured = [measure_pair(socket, pid, plan) for _ in range(runs)]
    result = median(measured)
    report = {"what": "overhead test", "plan": asdict(plan), "median": result, "runs": measured}
    click.echo(json.dumps(report, indent=1) if as_json else show(plan, result, runs))


if __name__ == "__main__":
    main()
