"""How long others have to wait: a newcomer beside somebody's hundred long requests, and four streams beside a prompt of
maximum length.

    python loadtest/fairness.py --model build/demo/smollm2-moe-q4

The owners are tenants, whom the daemon takes from this user's word. Times are what the client sees. The bar for the
newcomer's first token is twice the time without load plus the stall bound that the daemon publishes; that for the gaps
between the streams' tokens (99 of 100) the stall bound plus a decode step of theirs.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import uvloop
from colibri_client import AsyncClient, errors
from colibri_client.stream import AsyncStream
from overhead import daemon

HOG, NEWCOMER = "hog", "newcomer"
STREAMS = 4
HOURS = 3_600_000  # ms: nobody's deadline passes here
COLD = {"use": False}


def prompt(rng: random.Random, client: AsyncClient, length: int) -> list[int]:
    return [rng.randrange(3, client.model.vocab_size) for _ in range(length)]


def start(client: AsyncClient, tokens: list[int], tenant: str, max_tokens: int) -> AsyncStream:
    return client.generate(tokens, tenant=tenant, max_tokens=max_tokens, ignore_eos=True, cache=COLD, deadline_ms=HOURS)


async def ttft(client: AsyncClient, tokens: list[int]) -> float:
    """Seconds to the first token of a newcomer's short request."""
    begin = time.monotonic()
    async with start(client, tokens, NEWCOMER, 4) as stream:
        await anext(aiter(stream))
        return time.monotonic() - begin


async def swallow(stream: AsyncStream, gaps: list[tuple[float, float]] | None = None) -> None:
    """Reads it to its end. gaps: gets (when, seconds since the one before) of each token but the first."""
    last = 0.0
    try:
        async for _ in stream:
            now = time.monotonic()
            if gaps is not None and last:
                gaps.append((now, now - last))
            last = now
    except errors.ColibriError:
        return  # cancelled at the end of the part


async def until(client: AsyncClient, running: int) -> None:
    while (await client.stats()).running != running:
        await asyncio.sleep(0.01)


async def newcomer(client: AsyncClient, rng: random.Random, count: int, length: int, rounds: int) -> dict[str, Any]:
    """One who comes while count long requests of somebody else run and wait."""
    for _ in range(2):
        await ttft(client, prompt(rng, client, length))
    alone = [await ttft(client, prompt(rng, client, length)) for _ in range(rounds)]
    hogs = [start(client, prompt(rng, client, length), HOG, 8000) for _ in range(count)]
    reading = [asyncio.ensure_future(swallow(stream)) for stream in hogs]
    stats = await client.stats()
    places = sum(int(worker["max_seqs"]) for worker in stats.workers)
    await until(client, min(places, count))
    await asyncio.sleep(2)
    beside = []
    for _ in range(rounds):
        beside.append(await ttft(client, prompt(rng, client, length)))
        await asyncio.sleep(0.2 + rng.random())
    stats = await client.stats()
    for stream in hogs:
        stream.cancel()
    await asyncio.gather(*reading)
    await until(client, 0)
    bound = stats.counters["stall_bound_seconds"]
    return {"places": places, "alone_ms": 1000 * statistics.median(alone), "beside_ms": [1000 * s for s in beside],
            "bar_ms": 1000 * (2 * statistics.median(alone) + bound), "stall_bound_ms": 1000 * bound,
            "preempted": stats.counters["num_preemptions_total"]}


async def streams(client: AsyncClient, rng: random.Random, length: int, seconds: float) -> dict[str, Any]:
    """Their gaps before and while a prompt of this length is computed, for so long at most."""
    gaps: list[tuple[float, float]] = []
    few = [start(client, prompt(rng, client, 32), HOG, 100_000) for _ in range(STREAMS)]
    reading = [asyncio.ensure_future(swallow(stream, gaps)) for stream in few]
    await until(client, STREAMS)
    await asyncio.sleep(5)
    begin, before = time.monotonic(), sum(worker["rows"] for worker in (await client.stats()).workers)
    long = start(client, prompt(rng, client, length), NEWCOMER, 1)
    try:
        await asyncio.wait_for(anext(aiter(long)), seconds)
    except TimeoutError:
        long.cancel()
    stats = await client.stats()
    end, computed = time.monotonic(), sum(worker["rows"] for worker in stats.workers) - before
    for stream in few:
        stream.cancel()
    await asyncio.gather(*reading)
    quiet = sorted(gap for when, gap in gaps if when < begin)
    loaded = sorted(gap for when, gap in gaps if begin < when < end)
    step, bound = statistics.median(quiet), stats.counters["stall_bound_seconds"]
    return {"length": length, "rows": computed, "seconds": end - begin, "gaps": len(loaded), "step_ms": 1000 * step,
            "p50_ms": 1000 * statistics.median(loaded), "p99_ms": 1000 * loaded[len(loaded) * 99 // 100],
            "max_ms": 1000 * loaded[-1], "bar_ms": 1000 * (bound + step), "stall_bound_ms": 1000 * bound}


async def measure(socket: Path, count: int, rounds: int, length: int | None, seconds: float) -> dict[str, Any]:
    async with AsyncClient(socket, retries=0) as client:
        rng = random.Random(1)
        longest = client.model.max_len - 1
        return {"newcomer": await newcomer(client, rng, count, 32, rounds),
                "streams": await streams(client, rng, min(length or longest, longest), seconds)}


def show(result: dict[str, Any], count: int) -> str:
    new, few = result["newcomer"], result["streams"]
    beside = sorted(new["beside_ms"])
    return "\n".join([
        f"newcomer beside {count} long requests of another owner in {new['places']} places: first token "
        f"{statistics.median(beside):.0f} ms (median of {len(beside)}, most {beside[-1]:.0f}); alone "
        f"{new['alone_ms']:.0f}; bar {new['bar_ms']:.0f} = twice that + {new['stall_bound_ms']:.0f}; preempted "
        f"{new['preempted']:.0f}",
        f"{STREAMS} streams beside a prompt of {few['length']} tokens ({few['rows']:.0f} rows in {few['seconds']:.0f} "
        f"s): gap p50 {few['p50_ms']:.0f} p99 {few['p99_ms']:.0f} most {few['max_ms']:.0f} ms of {few['gaps']}; alone "
        f"{few['step_ms']:.0f}; bar {few['bar_ms']:.0f} = that + {few['stall_bound_ms']:.0f}",
    ])


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--count", type=click.IntRange(1, 1024), default=100, help="Long requests of the other owner.")
@click.option("--rounds", type=click.IntRange(1), default=10, help="Newcomers, one after the other.")
@click.option("--length", type=click.IntRange(1), default=None, help="Of the long prompt.  [default: what fits]")
@click.option("--seconds", type=click.FloatRange(1), default=90, help="For the long prompt; then it is cancelled.")
@click.option("--workers", type=click.IntRange(1), default=1)
@click.option("--threads", type=click.IntRange(0), default=0, help="Engine threads of a worker; 0: its share of cores.")
@click.option("--json", "as_json", is_flag=True)
def main(model: Path, count: int, rounds: int, length: int | None, seconds: float, workers: int, threads: int,
         as_json: bool) -> None:
    """Measure how long others have to wait."""
    with (tempfile.TemporaryDirectory(prefix="colibri-") as name,
          daemon(model, Path(name), workers, threads, queue_seconds=3600) as (socket, _)):
        result = uvloop.run(measure(socket, count, rounds, length, seconds))
    click.echo(json.dumps(result, indent=1) if as_json else show(result, count))


if __name__ == "__main__":
    main()
