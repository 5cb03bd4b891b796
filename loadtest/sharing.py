"""What a shared prompt costs with the prefix cache, one by one and all at once, and what the cache costs without hits.

    python loadtest/sharing.py --model build/demo/smollm2-moe-q4

All parts run in one daemon beside requests that may not use the cache: the figures are ratios of times in the same run,
and counters. Without hits, short rounds with and without the cache alternate. What is compared is the CPU time of the
daemon's processes, which other processes disturb far less than the time on the clock; the ratio is the median over the
pairs, with the interval in which 95 % of such medians lie when the pairs are drawn again.
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
from colibri_client import AsyncClient
from overhead import daemon, processes

COLD = {"use": False}


async def ttft(client: AsyncClient, prompt: list[int], **fields: Any) -> tuple[float, int]:
    """(seconds to the first token, prompt tokens found cached)."""
    begin = time.monotonic()
    stream = client.generate(prompt, max_tokens=4, ignore_eos=True, **fields)
    await anext(aiter(stream))
    first = time.monotonic() - begin
    async for _ in stream:
        pass
    return first, stream.result.usage.cached


def prompts(rng: random.Random, client: AsyncClient, length: int, count: int) -> list[list[int]]:
    """One system prompt, and for each request a short question."""
    vocab = client.model.vocab_size
    system = [rng.randrange(3, vocab) for _ in range(length)]
    return [system + [rng.randrange(3, vocab) for _ in range(16)] for _ in range(count)]


async def one_by_one(client: AsyncClient, length: int, count: int) -> dict[str, Any]:
    asked = prompts(random.Random(1), client, length, count)
    cold = [(await ttft(client, prompt, cache=COLD))[0] for prompt in asked[:3]]
    await ttft(client, asked[0])
    warm = [await ttft(client, prompt) for prompt in asked[1:]]
    hit = statistics.median(seconds for seconds, _ in warm)
    return {"cold_ms": 1000 * statistics.median(cold), "hit_ms": 1000 * hit, "cached": min(n for _, n in warm),
            "ratio": statistics.median(cold) / hit}


async def all_at_once(client: AsyncClient, length: int, count: int) -> dict[str, Any]:
    asked = prompts(random.Random(2), client, length, count)
    cold = statistics.median([(await ttft(client, prompt, cache=COLD))[0] for prompt in asked[:3]])
    before = await rows(client)
    answers = await asyncio.gather(*(ttft(client, prompt) for prompt in asked))
    computed = await rows(client) - before
    last = max(seconds for seconds, _ in answers)
    return {"cold_ms": 1000 * cold, "last_ms": 1000 * last, "ratio": last / cold, "rows_computed": computed,
            "rows_without_sharing": count * (length + 16 + 3), "not_cached": sum(not n for _, n in answers)}


async def no_hits(client: AsyncClient, pids: list[int], pairs: int) -> dict[str, Any]:
    """Prompts that share nothing, in 16 streams."""
    rng, cpu, clock = random.Random(3), [], []

    async def round_of(use: bool) -> tuple[float, float]:
        asked = [prompts(rng, client, 240, 1)[0] for _ in range(16)]
        begin, used = time.monotonic(), cpu_seconds(pids)
        await asyncio.gather(*(client.complete(prompt, max_tokens=64, ignore_eos=True, cache={"use": use})
                               for prompt in asked))
        return cpu_seconds(pids) - used, time.monotonic() - begin

    await round_of(True)
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        spent = {use: await round_of(use) for use in order}
        cpu.append(spent[True][0] / spent[False][0])
        clock.append(spent[True][1] / spent[False][1])
    misses = sum(worker["kv_free_list_misses"] for worker in (await client.stats()).workers)
    return {"cpu_ratio": statistics.median(cpu), "interval": interval(cpu), "cpu_ratios": cpu,
            "time_ratio": statistics.median(clock), "time_ratios": clock, "free_list_misses": misses}


def cpu_seconds(pids: list[int]) -> float:
    """Of all threads, the kernel's part included."""
    threads = [thread for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % of the median, by drawing the values again."""
    rng = random.Random(4)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    return medians[draws // 40], medians[-1 - draws // 40]


async def rows(client: AsyncClient) -> float:
    return sum(worker["rows"] for worker in (await client.stats()).workers)


async def measure(socket: Path, pids: list[int], length: int, count: int, pairs: int) -> dict[str, Any]:
    async with AsyncClient(str(socket)) as client:
        await ttft(client, [5] * 100, cache=COLD)
        return {"no_hits": await no_hits(client, pids, pairs), "one_by_one": await one_by_one(client, length, count),
                "all_at_once": await all_at_once(client, length, count)}


def show(result: dict[str, Any], length: int, count: int) -> str:
    one, many, none = result["one_by_one"], result["all_at_once"], result["no_hits"]
    return "\n".join([
        f"{length} shared tokens, {count} requests",
        f"  one by one: first token {one['cold_ms']:.0f} ms cold, {one['hit_ms']:.1f} ms with {one['cached']} cached: "
        f"{one['ratio']:.1f}x",
        f"  all at once: last first token {many['last_ms']:.0f} ms, {many['ratio']:.2f}x one cold; "
        f"{many['rows_computed']:.0f} rows computed instead of {many['rows_without_sharing']}",
        f"  no hits: CPU time with the cache / without {none['cpu_ratio']:.4f} "
        f"({none['interval'][0]:.4f} to {none['interval'][1]:.4f}, {len(none['cpu_ratios'])} pairs), "
        f"time {none['time_ratio']:.4f}; decode rows that waited for a slab: {none['free_list_misses']:.0f}",
    ])


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--length", type=click.IntRange(64), default=2000, help="Shared prompt tokens.")
@click.option("--count", type=click.IntRange(4, 32), default=32, help="Requests.")
@click.option("--pairs", type=click.IntRange(1), default=7, help="Of rounds without hits.")
@click.option("--workers", type=click.IntRange(1), default=1)
@click.option("--threads", type=click.IntRange(0), default=0, help="Engine threads of a worker; 0: its share of cores.")
@click.option("--json", "as_json", is_flag=True)
def main(model: Path, length: int, count: int, pairs: int, workers: int, threads: int, as_json: bool) -> None:
    """Measure time to first token with a shared prompt."""
    with tempfile.TemporaryDirectory(prefix="colibri-") as name, daemon(model, Path(name), workers, threads) as running:
        socket, supervisor = running
        result = uvloop.run(measure(socket, list(processes(supervisor).values()), length, count, pairs))
    click.echo(json.dumps(result, indent=1) if as_json else show(result, length, count))


if __name__ == "__main__":
    main()
