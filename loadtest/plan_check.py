"""What colibrid plan predicts beside what colibri-bench and the daemon then do.

    python loadtest/plan_check.py smol-q4 mixtral2-q4

For each model: prefill of --context tokens and decoding of 1, 8 and 16 streams that deep. The daemon is asked by the
client: first tokens of a prompt that nobody else has, alone; then tokens while all streams run, at the median time
between two. Exit code 1 if a prediction is off by more than --within. The machine must be quiet, or rates change
between prediction and measurement.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from colibri_client import AsyncClient
from colibri_engine.container import Manifest
from overhead import BIN, daemon

STREAMS = (1, 8, 16)
TOKENS = 48  # of each stream that decodes
REPEATS = 3


@dataclass(frozen=True)
class Row:
    """Predicted and measured, in the same unit."""

    model: str
    what: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def _run(*command: object) -> Any:
    out = subprocess.run([str(part) for part in command], check=False, capture_output=True)
    if not out.stdout:
        raise click.ClickException(out.stderr.decode())
    return json.loads(out.stdout)


def predicted(model: Path, context: int, threads: int) -> dict[int, dict[str, float]]:
    """Streams → figures."""
    found = {}
    for streams in STREAMS[1:]:
        document = _run(BIN / "colibrid", "plan", "--model", model, "--clients", streams, "--context", context,
                        "--threads", threads, "--json")  # fmt: skip
        found[streams] = {name: figure["value"] for name, figure in document["speed"].items()}
    return {1: found[STREAMS[1]] | {"decode_n": found[STREAMS[1]]["decode_1"]}, **found}


def engine(model: Path, context: int, threads: int, figures: dict[int, dict[str, float]]) -> Iterator[Row]:
    bench = [BIN / "colibri-bench", "--model", model, "-t", threads, "-r", REPEATS, "--json"]
    streams = ",".join(map(str, STREAMS))
    tests = [*_run(*bench, "-p", context, "-n", 0), *_run(*bench, "-p", 0, "-n", 16, "-d", context, "-b", streams)]
    for test in tests:
        if test["test"] == "prefill":
            yield Row(model.name, f"bench prefill {context}", figures[1]["prefill"], test["tokens_per_s"])
        else:
            batch = test["batch"]
            yield Row(model.name, f"bench decode {batch}", figures[batch]["decode_n"], test["tokens_per_s"])


def served(model: Path, context: int, threads: int, figures: dict[int, dict[str, float]]) -> Iterator[Row]:
    vocab, rng = Manifest.load(model).geometry.vocab, random.Random(1)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(length)]

    with tempfile.TemporaryDirectory() as folder, daemon(model, Path(folder), 1, threads) as (socket, _):
        waits = [asyncio.run(_together(socket, [prompt(context)], 1))[0] for _ in range(REPEATS + 1)]
        yield Row(model.name, f"daemon TTFT {context}, ms", 1000 * figures[1]["ttft_1"],
                  1000 * statistics.median(waits[1:]))  # fmt: skip
        for streams in STREAMS:
            rates = [asyncio.run(_together(socket, [prompt(context - TOKENS // 2) for _ in range(streams)], TOKENS))[1]
                     for _ in range(REPEATS if streams == 1 else 1)]  # fmt: skip
            yield Row(model.name, f"daemon decode {streams}", figures[streams]["decode_n"], statistics.median(rates))


async def _together(socket: Path, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Seconds to the last first token; tokens per second while all streams run, at the median time between two."""
    began = time.perf_counter()
    times: list[list[float]] = [[] for _ in prompts]
    async with AsyncClient(socket) as client:

        async def one(mine: list[float], ids: list[int], count: int) -> None:
            async for _ in client.generate(ids, max_tokens=count, ignore_eos=True):
                mine.append(time.perf_counter())

        # Those that come later get their first token later: all run until the last has had its share.
        extra = 0 if len(prompts) == 1 else 4 * tokens
        await asyncio.gather(*(one(mine, ids, tokens + extra) for mine, ids in zip(times, prompts, strict=True)))
    start, end = max(mine[0] for mine in times), min(mine[-1] for mine in times)
    gaps = [b - a for mine in times for a, b in pairwise(mine) if start <= a and b <= end]
    return start - began, len(prompts) / statistics.median(gaps) if gaps else 0.0


@click.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--context", default=256, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--within", default=0.25, show_default=True, help="Largest error, as a share of what was measured.")
def main(models: tuple[Path, ...], context: int, threads: int, within: float) -> None:
    """Compare prediction and measurement on MODELS."""
    rows: list[Row] = []
    click.echo(f"{'model':<14}{'what':<26}{'predicted':>11}{'measured':>11}{'ratio':>8}")
    for model in models:
        figures = predicted(model, context, threads)
        for source in (engine, served):
            for row in source(model, context, threads, figures):
                rows.append(row)
                click.echo(f"{row.model:<14}{row.what:<26}{row.predicted:>11.1f}{row.measured:>11.1f}{row.ratio:>8.2f}")
    off = [row for row in rows if abs(row.ratio - 1) > within]
    click.echo(f"{len(rows) - len(off)} of {len(rows)} within {within:.0%}")
    sys.exit(bool(off))


if __name__ == "__main__":
    main()
