"""How fast the daemon answers those who watch it, at full load: HEALTH on the client socket, a scrape of /metrics and
/health/ready.

    python loadtest/answers.py --model build/demo/smollm2-moe-q4 --streams 32 --seconds 20

A process of its own keeps so many streams running; the questions come from this one, one at a time at random moments,
under real-time scheduling if it may (root), so that what is measured is the daemon's time to answer and not our own
waiting for a core. Bars: HEALTH < 10 ms, scrape p99 < 5 ms.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click
import uvloop
from colibri_client import AsyncClient, Client
from overhead import daemon

Question = Callable[[], None]


async def _keep_running(path: Path, streams: int) -> None:
    async with AsyncClient(path) as client:
        rng = random.Random(os.getpid())

        async def one() -> None:
            while True:
                prompt = [rng.randrange(3, client.model.vocab_size) for _ in range(rng.randrange(8, 128))]
                async for _ in client.generate(prompt, max_tokens=256, ignore_eos=True, cache={"use": False}):
                    pass

        await asyncio.gather(*(one() for _ in range(streams)))


def load(path: Path, streams: int) -> None:
    uvloop.run(_keep_running(path, streams))


class _UnixHttp(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def _get(path: Path, route: str) -> Question:
    def ask() -> None:
        connection = _UnixHttp(path)
        connection.request("GET", route)
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise SystemExit(f"{route}: {answer.status}")
        connection.close()

    return ask


def ask_all(questions: dict[str, Question], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each answer."""
    rng, took = random.Random(1), {name: [] for name in questions}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, ask in questions.items():
            time.sleep(rng.uniform(0, 0.02))
            begin = time.monotonic()
            ask()
            took[name].append(1000 * (time.monotonic() - begin))
    return took


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"n": len(ordered), "p50": statistics.median(ordered), "p99": ordered[len(ordered) * 99 // 100],
            "max": ordered[-1]}  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--streams", type=click.IntRange(1), default=32)
@click.option("--seconds", type=click.FloatRange(1), default=20)
@click.option("--workers", type=click.IntRange(1), default=1)
@click.option("--threads", type=click.IntRange(0), default=0, help="Engine threads of a worker; 0: its share of cores.")
@click.option("--json", "as_json", is_flag=True)
def main(model: Path, streams: int, seconds: float, workers: int, threads: int, as_json: bool) -> None:
    """Measure how fast the daemon answers those who watch it."""
    with tempfile.TemporaryDirectory(prefix="colibri-") as name:
        metrics = Path(name) / "metrics"
        with daemon(model, Path(name), workers, threads, metrics=f"unix:{metrics}") as (path, _):
            process = multiprocessing.get_context("spawn").Process(target=load, args=(path, streams), daemon=True)
            process.start()
            with suppress(PermissionError):
                os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # before the client starts its thread
            with Client(path) as client:
                while client.stats().running < min(streams, 4):
                    time.sleep(0.05)
                took = ask_all({"HEALTH": client.health, "/metrics": _get(metrics, "/metrics"),
                                "/health/ready": _get(metrics, "/health/ready")}, seconds)
                rows = sum(worker["rows"] for worker in client.stats().workers)
            process.terminate()
            process.join()
    found = {name: summary(values) for name, values in took.items()}
    if as_json:
        click.echo(json.dumps({"rows": rows, "answers_ms": found}, indent=1))
        return
    for name, row in found.items():
        click.echo(f"{name:14} p50 {row['p50']:6.2f}  p99 {row['p99']:6.2f}  most {row['max']:6.2f} ms of {row['n']}")
    click.echo(f"rows computed meanwhile: {rows}")


if __name__ == "__main__":
    main()
