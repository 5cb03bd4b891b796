"""colibri-client top: a live view. `frame` is pure; the rest asks, draws and listens for q."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import click
from colibri_protocol.messages import HealthReply, ModelInfo, StatsReply, WorkerHealth
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import ColibriError
from ..sync import Client
from .state import size
from .target import Exit, Target, connecting, described

# Shown first: label -> counter. Other counters follow as they are, once they are not zero.
RATES = {
    "tokens out": "generation_tokens_total",
    "tokens in": "prompt_tokens_total",
    "requests": "requests_started_total",
}
SILENT_MS = 1000.0  # a busy worker that has not moved for so long is worth a look
STATE_STYLE = {"ready": "green", "degraded": "yellow", "starting": "yellow", "draining": "yellow", "failed": "red"}
SLAB_STYLE = {"free": "bright_black", "live": "green", "leased": "green", "committed": "cyan", "cached": "blue"}
BAR = 40
PATIENCE = 2.0  # seconds for an answer, so that a daemon that is gone does not keep q from being heard


@dataclass(frozen=True)
class Sample:
    """What the daemon said at one moment. at: seconds on a monotonic clock."""

    at: float
    health: HealthReply
    stats: StatsReply
    model: ModelInfo


@click.command()
@click.option("--interval", type=click.FloatRange(0.1, 60), default=1.0, show_default=True, metavar="SECONDS",
              help="Between two looks.")
@click.option("--once", is_flag=True, help="Print one picture, of one interval, and end.")
@connecting
def top(target: Target, interval: float, once: bool) -> int | None:
    """Live view: state, workers, queue, KV cache, and rates from the differences of counters. q or Ctrl-C ends it.

    \b
    Examples:
      colibri-client top --interval 0.5
      colibri-client top --once

    A daemon that goes away while it is watched is waited for. Exit codes: see colibri-client --help.
    """
    console = Console()
    with Client(target.socket, timeout=PATIENCE, connect_timeout=PATIENCE, reconnect=0) as client:
        first = take(client)
        if once:
            time.sleep(interval)
            console.print(frame(first, take(client)))
            return None
        with contextlib.suppress(KeyboardInterrupt):
            _watch(client, console, first, interval)
    return Exit.OK


def take(client: Client) -> Sample:
    return Sample(time.monotonic(), client.health(), client.stats(), client.model)


def _watch(client: Client, console: Console, last: Sample, interval: float) -> None:
    with _keys() as pressed, Live(frame(None, last), console=console, screen=True, auto_refresh=False) as live:
        while not pressed(interval):
            try:
                sample = take(client)
            except ColibriError as e:
                live.update(Group(Text(described(e), style="red"), frame(None, last)), refresh=True)
                continue
            live.update(frame(last, sample), refresh=True)
            last = sample


@contextlib.contextmanager
def _keys() -> Iterator[object]:
    """A function that waits so many seconds and tells whether q was pressed. Without a terminal it only waits."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds)
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield lambda seconds: _pressed(terminal, seconds)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _pressed(terminal: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            keys = os.read(terminal, 64)
            if not keys or b"q" in keys.lower():
                return True
    return False


# ---- the picture ---------------------------------------------------------------------------------------------------


def frame(before: Sample | None, now: Sample) -> RenderableType:
    """Rates are over the time between the two samples; none without an earlier one, or after a restart."""
    if before is not None and before.stats.uptime_s > now.stats.uptime_s:
        before = None
    return Group(_head(now), Text(), _load(before, now), Text(), _slabs(now.stats), Text(), _workers(before, now),
                 Text(), _counters(before, now))


def _head(now: Sample) -> Text:
    health = now.health
    line = Text.assemble(("colibri ", "bold"), now.model.name, "  ",
                         (health.state, f"bold {STATE_STYLE.get(health.state, '')}"))
    if health.reason:
        line.append(f": {health.reason}")
    return line.append(f"  up {duration(now.stats.uptime_s)}", style="bright_black")


def _load(before: Sample | None, now: Sample) -> RenderableType:
    stats = now.stats
    grid = Table.grid(padding=(0, 3))
    grid.add_row(f"running {stats.running}", f"waiting {stats.waiting} ({stats.waiting_tokens} tokens)",
                 f"connections {stats.connections}", f"cache hits {_hit_rate(stats)}")
    grid.add_row(*(f"{label} {_shown_rate(rate(before, now, name))}/s" for label, name in RATES.items()))
    return grid


def rate(before: Sample | None, now: Sample, counter: str) -> float | None:
    """Per second; None if it cannot be known."""
    if before is None or now.at <= before.at:
        return None
    grown = now.stats.counters.get(counter, 0.0) - before.stats.counters.get(counter, 0.0)
    return grown / (now.at - before.at)


def _shown_rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _hit_rate(stats: StatsReply) -> str:
    asked = stats.counters.get("prefix_cache_queries_total", 0.0)
    return f"{stats.counters.get('prefix_cache_hits_total', 0.0) / asked:.0%}" if asked else "–"


def _slabs(stats: StatsReply) -> Text:
    """A bar of the KV cache's slabs by state, and the numbers."""
    slabs = {name: count for name, count in stats.kv_slabs.items() if name != "total"}
    total = sum(slabs.values())
    if not total:
        return Text("KV cache: nothing known yet", style="bright_black")
    line = Text("KV ")
    for name, width in zip(slabs, shares(list(slabs.values()), BAR), strict=True):
        line.append("█" * width, style=SLAB_STYLE.get(name, "magenta"))
    for name, count in slabs.items():
        line.append(f"  {name} ", style=SLAB_STYLE.get(name, "magenta")).append(f"{count:.0f}")
    return line


def shares(counts: Sequence[float], width: int) -> list[int]:
    """Widths in proportion that add up to width."""
    total, done, widths = sum(counts), 0.0, []
    for count in counts:
        start, done = done, done + count
        widths.append(round(done / total * width) - round(start / total * width))
    return widths


@dataclass(frozen=True)
class Slot:
    """One worker: its health, its numbers now and at the earlier sample ({}: not known), and the time between."""

    health: WorkerHealth
    now: dict[str, float]
    before: dict[str, float]
    seconds: float

    def share(self, part: str, whole: str) -> str:
        return f"{self.now[part]:.0f}/{self.now[whole]:.0f}" if part in self.now and whole in self.now else ""

    def count(self, name: str) -> str:
        return f"{self.now[name]:.0f}" if name in self.now else ""

    def per_second(self, counter: str) -> float | None:
        """None if it cannot be known, as after a restart."""
        grown = self.now.get(counter, 0.0) - self.before.get(counter, 0.0)
        return grown / self.seconds if counter in self.before and self.seconds > 0 and grown >= 0 else None


def _state(slot: Slot) -> Text:
    if not slot.health.up:
        return Text("down", "red")
    if slot.health.busy and slot.health.progress_age_ms > SILENT_MS:
        return Text(f"silent {slot.health.progress_age_ms / 1000:.0f} s", "yellow")
    return Text("busy", "green") if slot.health.busy else Text("idle")


def _in_steps(slot: Slot) -> str:
    """Share of the time that it spent in steps."""
    busy = slot.per_second("busy_us")
    return "–" if busy is None else f"{busy / 1e6:.0%}"


WORKER_COLUMNS: dict[str, Callable[[Slot], str | Text]] = {
    "worker": lambda slot: str(slot.health.slot),
    "state": _state,
    "running": lambda slot: slot.share("running", "max_seqs"),
    "slabs": lambda slot: slot.count("kv_leases"),
    "steps/s": lambda slot: _shown_rate(slot.per_second("steps")),
    "rows/s": lambda slot: _shown_rate(slot.per_second("rows")),
    "in steps": _in_steps,
    "memory": lambda slot: size(slot.health.resident_bytes) if slot.health.resident_bytes else "",
    "restarts": lambda slot: str(slot.health.restarts),
    "pid": lambda slot: str(slot.health.pid or ""),
}


def _workers(before: Sample | None, now: Sample) -> RenderableType:
    table = Table(*WORKER_COLUMNS, box=None, padding=(0, 1, 0, 0), header_style="bright_black")
    for worker in now.health.workers:
        seconds = now.at - before.at if before else 0.0
        slot = Slot(worker, _own(now, worker.slot), _own(before, worker.slot), seconds)
        table.add_row(*(column(slot) for column in WORKER_COLUMNS.values()))
    return table


def _own(sample: Sample | None, slot: int) -> dict[str, float]:
    return sample.stats.workers[slot] if sample and slot < len(sample.stats.workers) else {}


def _counters(before: Sample | None, now: Sample) -> RenderableType:
    shown = set(RATES.values())
    table = Table("counter", "total", "per second", box=None, padding=(0, 1, 0, 0), header_style="bright_black")
    for name, total in sorted(now.stats.counters.items()):
        if total and name not in shown:
            per_second = _shown_rate(rate(before, now, name)) if "_total" in name else ""
            table.add_row(Text(name), f"{total:.10g}", per_second)
    return table


def duration(seconds: float) -> str:
    """As days, hours, minutes, seconds: the two largest."""
    parts, rest = [], int(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        if count or parts or unit == "s":
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])
