"""colibri-client health and stats."""

from __future__ import annotations

import time

import click
from colibri_protocol.messages import HealthReply, StatsReply, WorkerHealth

from ..errors import ColibriError
from ..sync import Client
from . import experts
from .output import dump, plain
from .target import Exit, Target, connecting

POLL_SECONDS = 0.2  # of health --wait
ANSWER_SECONDS = 10.0  # a daemon that is alive answers at once


@click.command()
@click.option("--wait", type=click.FloatRange(0), default=0.0, metavar="SECONDS",
              help="Ask again until the daemon is ready, at most so long.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@connecting
def health(target: Target, wait: float, as_json: bool) -> int:
    """Is the daemon ready? Prints its state and its workers.

    \b
    Examples:
      colibri-client health --wait 60 && colibri-client generate 'Hello'
      colibri-client health --json

    \b
    Exit codes:
      0  ready
      1  it answers, but is not ready: starting, draining or failed; the reason is printed
      3  no connection to the daemon, or no answer
    """
    reply = _ready_within(target.socket, wait)
    if as_json:
        dump(plain(reply))
    else:
        click.echo(health_text(reply))
    return Exit.OK if reply.ready else Exit.FAILED


def _ready_within(socket: str, seconds: float) -> HealthReply:
    """The first reply that says ready, or the last one before the time is over."""
    until = time.monotonic() + seconds
    while True:
        late = time.monotonic() >= until
        try:
            with Client(socket, reconnect=0) as client:
                reply = client.health(timeout=ANSWER_SECONDS)
            if reply.ready or late:
                return reply
        except ColibriError:
            if late:
                raise
        time.sleep(max(0.0, min(POLL_SECONDS, until - time.monotonic())))


def health_text(reply: HealthReply) -> str:
    """A line for the daemon and one for each worker."""
    first = reply.state + (f": {reply.reason}" if reply.reason else "")
    if reply.progress is not None and not reply.ready:
        first += f" ({reply.progress:.0%})"
    return "\n".join([first, *map(worker_text, reply.workers)])


def worker_text(worker: WorkerHealth) -> str:
    state = "down" if not worker.up else "busy" if worker.busy else "idle"
    parts = [f"worker {worker.slot}: {state}"]
    if worker.pid:
        parts.append(f"pid {worker.pid}")
    if worker.resident_bytes:
        parts.append(size(worker.resident_bytes))
    if worker.restarts:
        parts.append(f"{worker.restarts} restarts")
    return ", ".join(parts)


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@click.command()
@click.option("--experts", "with_experts", is_flag=True, help="A heat map of the tokens that each expert was given.")
@click.option("--seconds", type=click.FloatRange(0), default=0.0, metavar="SECONDS",
              help="With --experts: only tokens of the next so many seconds, not all since the start.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@connecting
def stats(target: Target, with_experts: bool, seconds: float, as_json: bool) -> None:
    """The daemon's counters since it started, under the names of its metrics without colibri_.

    \b
    Examples:
      colibri-client stats --json | jq .running
      colibri-client stats --experts --seconds 10

    Exit codes: see colibri-client --help.
    """
    with Client(target.socket) as client:
        if with_experts:
            return experts.show(client, seconds, as_json)
        reply = client.stats(timeout=ANSWER_SECONDS)
    if as_json:
        dump({name: value for name, value in plain(reply).items() if not name.startswith("expert")})
    else:
        click.echo("\n".join(f"{name:<48} {value:>14.10g}" for name, value in stats_rows(reply)))


def stats_rows(reply: StatsReply) -> list[tuple[str, float]]:
    """Everything as (name, number)."""
    rows = [(name, float(getattr(reply, name)))
            for name in ("uptime_s", "running", "waiting", "waiting_tokens", "connections")]
    rows += [(f"kv_slabs.{name}", value) for name, value in reply.kv_slabs.items()]
    rows += list(reply.counters.items())
    for slot, worker in enumerate(reply.workers):
        rows += [(f"worker.{slot}.{name}", value) for name, value in worker.items()]
    return rows
