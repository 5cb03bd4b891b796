"""More requests than there is room for, all at once: who is refused, when they may come back, and what it costs.

    python loadtest/admission.py

The clients obey: whoever is refused with QUEUE_FULL comes back after exactly the time it was told, again and again
until it is taken. What counts is how many are taken at their first return. Then everything that was started must have
finished, by the daemon's own counters. Memory is the dispatcher's proportional share (PSS) as the kernel counts it,
compared with before the burst. The model is too small to matter unless one is given.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import uvloop
from colibri_client import AsyncClient, errors
from overhead import daemon, make_model, processes

CONNECTIONS = 16
RETURNS_MOST = 20
WARM_UP = 500


@dataclass
class Burst:
    """offered: seconds from first to last. returns: clients by how often they had to come back; pss: of the dispatcher,
    in bytes, over time."""

    offered: float = 0.0
    returns: Counter[int] = field(default_factory=Counter)
    longest: float = 0.0  # seconds that somebody was told to wait
    failures: Counter[str] = field(default_factory=Counter)
    pss: list[int] = field(default_factory=list)


def pss_of(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"no Pss of {pid}")


async def one(client: AsyncClient, burst: Burst, tokens: int) -> None:
    """A request and its returns."""
    for times in range(RETURNS_MOST):
        try:
            await client.complete([5, 6, 7], max_tokens=tokens, ignore_eos=True)
        except errors.Overloaded as e:
            if e.name != "QUEUE_FULL" or not e.retry_after:
                burst.failures[e.name] += 1
                return
            burst.longest = max(burst.longest, e.retry_after)
            await asyncio.sleep(e.retry_after)
        except errors.ColibriError as e:
            burst.failures[getattr(e, "name", type(e).__name__)] += 1
            return
        else:
            burst.returns[times] += 1
            return
    burst.failures["gave up"] += 1


async def watch(burst: Burst, pid: int) -> None:
    while True:
        burst.pss.append(pss_of(pid))
        await asyncio.sleep(0.1)


async def offer(clients: list[AsyncClient], burst: Burst, count: int, tokens: int) -> None:
    """count requests as evenly over a second as this process can, and all their returns."""
    begin, tasks = time.monotonic(), []
    for number in range(count):
        if number % 50 == 0:
            await asyncio.sleep(max(0.0, begin + number / count - time.monotonic()))
        tasks.append(asyncio.ensure_future(one(clients[number % len(clients)], burst, tokens)))
    await asyncio.sleep(0)
    burst.offered = time.monotonic() - begin
    await asyncio.gather(*tasks)


async def measure(socket: Path, pid: int, count: int, tokens: int, cold: bool) -> dict[str, Any]:
    """pid: of the dispatcher. cold: nothing comes before the burst, so that the daemon does not know its own speed."""
    clients = [AsyncClient(socket, retries=0) for _ in range(CONNECTIONS)]
    for client in clients:
        await client.connect()
    if not cold:
        await offer(clients, Burst(), WARM_UP, tokens)
    burst, before = Burst(), pss_of(pid)
    watching = asyncio.ensure_future(watch(burst, pid))
    begin = time.monotonic()
    await offer(clients, burst, count, tokens)
    seconds = time.monotonic() - begin
    watching.cancel()
    counters = (await clients[0].stats()).counters
    for client in clients:
        await client.close()
    refused = count - burst.returns[0] - burst.failures.total()
    finished = sum(value for name, value in counters.items() if name.startswith("request_success_total"))
    return {
        "count": count, "offered_s": burst.offered, "refused": refused, "taken_at_first_return": burst.returns[1],
        "share": burst.returns[1] / max(refused, 1), "returns": dict(sorted(burst.returns.items())),
        "failures": dict(burst.failures), "longest_wait_s": burst.longest, "seconds": seconds,
        "pss_before": before, "pss_growth": max(burst.pss) - before,
        "pss_growth_after": pss_of(pid) - before,
        "started": counters["requests_started_total"], "finished": finished,
    }  # fmt: skip


def show(result: dict[str, Any]) -> str:
    r, mb = result, 1 / (1 << 20)
    return "\n".join([
        f"{r['count']} requests within {r['offered_s']:.2f} s: {r['refused']} refused, told to wait up to "
        f"{r['longest_wait_s']:.1f} s; all done after {r['seconds']:.1f} s; failures {r['failures'] or 'none'}",
        f"  taken at the first return: {r['taken_at_first_return']} = {r['share']:.1%}; by number of returns "
        f"{r['returns']}",
        f"  dispatcher's PSS: {mb * r['pss_before']:.1f} MB before, at most {mb * r['pss_growth']:+.2f} MB during, "
        f"{mb * r['pss_growth_after']:+.2f} MB after",
        f"  started {r['started']:.0f}, finished {r['finished']:.0f}",
    ])


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=None, help="[default: one small layer]")
@click.option("--count", type=click.IntRange(1), default=10_000, help="Requests within a second.")
@click.option("--tokens", type=click.IntRange(1), default=8, help="Output tokens of each.")
@click.option("--cold", is_flag=True, help="Without a warm-up.")
@click.option("--workers", type=click.IntRange(1), default=1)
@click.option("--threads", type=click.IntRange(1), default=1, help="Engine threads of a worker.")
@click.option("--json", "as_json", is_flag=True)
def main(model: Path | None, count: int, tokens: int, cold: bool, workers: int, threads: int, as_json: bool) -> None:
    """Offer far more requests than there is room for."""
    with tempfile.TemporaryDirectory(prefix="colibri-") as name:
        folder = Path(name)
        with daemon(model or make_model(folder), folder, workers, threads, queue_requests=0) as (socket, pid):
            result = uvloop.run(measure(socket, processes(pid)["dispatcher"], count, tokens, cold))
    click.echo(json.dumps(result, indent=1) if as_json else show(result))


if __name__ == "__main__":
    main()
