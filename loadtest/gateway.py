"""What the gateway costs end to end, and how soon a client that leaves is noticed.

    python loadtest/gateway.py --binary build/colibri-gateway --rate 200 --rate 400 --seconds 10

Load: an open loop as in overhead.py (sent at times fixed beforehand, latency from the scheduled time) on the one-layer
model, as streams of POST /v1/generate over kept connections, with the share of each process. Where client, gateway and
daemon compete for few cores, the client's share is not available to the others.

Cancel: streams are left in the middle; from closing the connection until the daemon runs nothing and until no KV memory
is held. The daemon is asked again and again over a connection of its own, so the time of an answer is included.

The gateway alone, without a daemon: go test -run xxx -bench . -cpu 1 ./gateway in client/go.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket as sockets
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import overhead
import uvloop
from colibri_client import Client, errors

P95_MS = 132.0


class HTTP:
    """Generates over kept connections: one for each request that runs."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def generate(self, tokens: bytes, *, max_tokens: int, ignore_eos: bool) -> AsyncIterator[int]:
        ids = [int.from_bytes(tokens[i : i + 4], "little") for i in range(0, len(tokens), 4)]
        body = json.dumps({"tokens": ids, "max_tokens": max_tokens, "ignore_eos": ignore_eos}).encode()
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                     b"Content-Length: %d\r\n\r\n" % len(body) + body)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            writer.close()
            raise errors.ColibriError(head[:12].decode())
        while size := int(await reader.readline(), 16):
            line = await reader.readexactly(size)
            await reader.readexactly(2)
            for token in json.loads(line).get("tokens", ()):
                yield token
        await reader.readexactly(2)
        self._idle.append((reader, writer))

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


@contextmanager
def gateway(binary: Path, socket: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A running one and its port."""
    with sockets.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([binary, "--listen", f"127.0.0.1:{port}", "--socket", socket, "--log-level", "error",
                                "--max-requests", "100000"])  # fmt: skip
    try:
        while True:
            try:
                sockets.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        yield process, port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def measure(port: int, found: dict[str, int], plan: overhead.Plan) -> dict[str, Any]:
    """One load through the gateway."""
    async def drive() -> overhead.Run:
        client = HTTP(port)
        try:
            return await overhead.drive([client], plan)
        finally:
            client.close()

    before, own = {role: overhead.cpu_seconds(pid) for role, pid in found.items()}, overhead.own_cpu_seconds()
    run = uvloop.run(drive())
    cores = {role: (overhead.cpu_seconds(pid) - before[role]) / run.elapsed for role, pid in found.items()}
    ordered = sorted(run.latencies) or [float("nan")]
    return {
        "rate": plan.rate, "done_per_s": len(run.latencies) / run.elapsed, "failures": dict(run.failures),
        "ms": {p: 1000 * ordered[min(p * len(ordered) // 100, len(ordered) - 1)] for p in (50, 95, 99)},
        "cores": cores | {"client": (overhead.own_cpu_seconds() - own) / run.elapsed},
    }  # fmt: skip


def cancels(port: int, socket: Path, count: int) -> dict[str, dict[str, float]]:
    """Milliseconds from closing to the daemon's end of the request, and to KV memory free."""
    ended, free = [], []
    rng = random.Random(1)
    body = json.dumps({"tokens": [3, 4, 5], "max_tokens": 2000, "ignore_eos": True}).encode()
    with Client(socket) as client:
        for _ in range(count):
            with sockets.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                             b"Content-Length: %d\r\n\r\n" % len(body) + body)
                sock.recv(1 << 16)
                time.sleep(rng.uniform(0, 0.05))
            begin = time.monotonic()
            while client.stats().running:
                pass
            ended.append(1000 * (time.monotonic() - begin))
            while client.stats().kv_slabs["live"]:
                pass
            free.append(1000 * (time.monotonic() - begin))
    return {name: {"p50": statistics.median(ms), "most": max(ms)} for name, ms in (("ended", ended), ("KV free", free))}


def show(result: dict[str, Any]) -> str:
    shares = "  ".join(f"{role} {cores:.2f}" for role, cores in result["cores"].items())
    ms = "  ".join(f"p{p} {value:.1f}" for p, value in result["ms"].items())
    return (f"{result['rate']:g} requests/s: done {result['done_per_s']:.0f}/s, failed {result['failures'] or 0}; "
            f"end to end ms: {ms}\n  cores: {shares}")  # fmt: skip


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.option("--binary", type=click.Path(path_type=Path, exists=True), required=True, help="The gateway.")
@click.option("--rate", "rates", type=float, multiple=True, default=(100.0, 200.0, 400.0), help="Requests per second.")
@click.option("--seconds", default=10.0)
@click.option("--prompt", default=16)
@click.option("--tokens", default=8)
@click.option("--cancel", "count", default=50, help="Streams to leave.")
def main(binary: Path, rates: tuple[float, ...], seconds: float, prompt: int, tokens: int, count: int) -> None:
    binary = binary.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = overhead.make_model(folder)
        with overhead.daemon(model, folder, 1, 1) as (socket, supervisor), gateway(binary, socket) as (process, port):
            found = overhead.processes(supervisor) | {"gateway": process.pid}
            best = 0.0
            for rate in rates:
                plan = overhead.Plan(rate, seconds, prompt, tokens, 1, True, 1)
                result = measure(port, found, plan)
                click.echo(show(result))
                if result["ms"][95] <= P95_MS and not result["failures"]:
                    best = max(best, rate)
            click.echo(f"highest of these rates with p95 <= {P95_MS:g} ms: {best:g}/s")
            for what, ms in cancels(port, socket, count).items():
                click.echo(f"cancel, {what}: p50 {ms['p50']:.1f} ms, most {ms['most']:.1f} ms")


if __name__ == "__main__":
    main()
