"""What a token costs far behind pinned prefix and window, and how much memory the text keeps.

    python loadtest/long_run.py --model build/demo/smollm2-moe-q4 --pinned 128 --window 384

One request runs to --times × (P + W) tokens. For each stretch of P + W tokens: CPU time of the worker per token, which
other processes disturb far less than the time on the clock, and the most KV slabs that were live. Both are to be the
same from the second stretch on: the first one still fills the window.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from pathlib import Path

import click
import uvloop
from colibri_client import AsyncClient
from overhead import daemon, processes
from sharing import cpu_seconds

LOOKS = 16  # at the slabs, in each stretch


async def measure(socket: Path, worker: int, seen: int, times: int) -> list[dict[str, float]]:
    async with AsyncClient(str(socket)) as client:
        rng = random.Random(1)
        prompt = [rng.randrange(3, client.model.vocab_size) for _ in range(32)]
        stream = client.generate(prompt, max_tokens=times * seen, ignore_eos=True)
        stretches: list[dict[str, float]] = []
        tokens, slabs, cpu, clock = 0, 0.0, cpu_seconds([worker]), time.monotonic()
        async for _ in stream:
            tokens += 1
            if tokens % (seen // LOOKS) == 0:
                slabs = max(slabs, (await client.stats()).kv_slabs["live"])
            if tokens % seen == 0:
                used, now = cpu_seconds([worker]), time.monotonic()
                stretches.append({"tokens": tokens, "cpu_ms": 1000 * (used - cpu) / seen,
                                  "ms": 1000 * (now - clock) / seen, "slabs": slabs})  # fmt: skip
                slabs, cpu, clock = 0.0, used, now
        return stretches


def show(stretches: list[dict[str, float]], seen: int) -> str:
    lines = [f"P + W = {seen} tokens", "   up to token   CPU ms/token   ms/token   most live slabs"]
    lines += [f"  {s['tokens']:12.0f} {s['cpu_ms']:14.3f} {s['ms']:10.2f} {s['slabs']:17.0f}" for s in stretches]
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--pinned", type=click.IntRange(0), default=128)
@click.option("--window", type=click.IntRange(16), default=384)
@click.option("--times", type=click.IntRange(2), default=5, help="Length, in P + W.")
@click.option("--json", "as_json", is_flag=True)
def main(model: Path, pinned: int, window: int, times: int, as_json: bool) -> None:
    """Measure one long generation."""
    os.environ.update(COLIBRI_PINNED=str(pinned), COLIBRI_WINDOW=str(window))
    with tempfile.TemporaryDirectory(prefix="colibri-") as name, daemon(model, Path(name), 1, 1) as running:
        socket, supervisor = running
        worker = processes(supervisor)["worker 0"]
        stretches = uvloop.run(measure(socket, worker, pinned + window, times))
    click.echo(json.dumps(stretches, indent=1) if as_json else show(stretches, pinned + window))


if __name__ == "__main__":
    main()
