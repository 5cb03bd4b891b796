"""What a shared prompt costs with the prefix cache, one by one and all at once, and what the cache costs without hits.

    python loadtest/sharing.py --model build/demo/smollm2-moe-q4

All parts run in one daemon beside requests that may not use the cache: the figures are ratios of times in the same run,
and counters. Without hits, rounds with and without the cache alternate; the ratio is the median over the pairs.
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
from overhead import daemon

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


async def no_hits(client: AsyncClient, pairs: int) -> dict[str, Any]:
    """Prompts that share nothing, in 16 streams."""
    rng, ratios = random.Random(3), []

    async def round_of(use: bool) -> float:
        asked = [prompts(rng, client, 240, 1)[0] for _ in range(16)]
        begin = time.monotonic()
        await asyncio.gather(*(client.complete(prompt, max_tokens=64, ignore_eos=True, cache={"use": use})
                               for prompt in asked))
        return time.monotonic() - begin

    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        seconds = {use: await round_of(use) for use in order}
        ratios.append(seconds[True] / seconds[False])
    misses = sum(worker["kv_free_list_misses"] for worker in (await client.stats()).workers)
    return {"time_ratio": statistics.median(ratios), "ratios": ratios, "free_list_misses": misses}


async def rows(client: AsyncClient) -> float:
    return sum(worker["rows"] for worker in (await client.stats()).workers)


async def measure(socket: Path, length: int, count: int, pairs: int) -> dict[str, Any]:
    async with AsyncClient(str(socket)) as client:
        await ttft(client, [5] * 100, cache=COLD)
        return {"no_hits": await no_hits(client, pairs), "one_by_one": await one_by_one(client, length, count),
                "all_at_once": await all_at_once(client, length, count)}


def show(result: dict[str, Any], length: int, count: int) -> str:
    one, many, none = result["one_by_one"], result["all_at_once"], result["no_hits"]
    return "\n".join([
        f"{length} shared tokens, {count} requests",
        f"  one by one: first token {one['cold_ms']:.0f} ms cold, {one['hit_ms']:.1f} ms with {one['cached']} cached: "
        f"{one['ratio']:.1f}x",
        f"  all at once: last first token {many['last_ms']:.0f} ms, {many['ratio']:.2f}x one cold; "
        f"{many['rows_computed']:.0f} rows computed instead of {many['rows_without_sharing']}",
        f"  no hits: time with the cache / without {none['time_ratio']:.4f} (median of {len(none['ratios'])} pairs); "
        f"decode rows that waited for a slab: {none['free_list_misses']:.0f}",
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
        result = uvloop.run(measure(running[0], length, count, pairs))
    click.echo(json.dumps(result, indent=1) if as_json else show(result, length, count))


if __name__ == "__main__":
    main()
