"""colibri-client health, stats and top."""

from __future__ import annotations

import io
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from colibri_client.cli import main
from colibri_client.cli.state import size, stats_rows
from colibri_client.cli.top import Sample, duration, frame, rate, shares
from colibri_protocol.messages import Health, HealthReply, StatsReply, WorkerHealth
from fixtures.command import Cli
from fixtures.little_daemon import READY, STATS, LittleDaemon
from fixtures.scripted_server import MODEL
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

STARTING = HealthReply(live=True, ready=False, state="starting", reason="the model is being loaded", progress=0.5)


# ---- health --------------------------------------------------------------------------------------------------------


def test_ready(cli: Cli) -> None:
    outcome = cli("health")
    assert outcome.code == 0
    assert outcome.out == "ready\nworker 0: busy, pid 7, 3.0 GiB, 2 restarts\n"
    body = cli("health", "--json").json
    assert (body["ready"], body["workers"][0]["slot"]) == (True, 0)


def test_not_ready(cli: Cli, daemon: LittleDaemon) -> None:
    daemon.health = [STARTING]
    outcome = cli("health")
    assert (outcome.code, outcome.out) == (1, "starting: the model is being loaded (50%)\n")
    daemon.health = [replace(READY, ready=False, state="failed", workers=(WorkerHealth(slot=0),))]
    assert cli("health").out == "failed\nworker 0: down\n"


def test_no_daemon(bare: Cli, tmp_path: Path) -> None:
    outcome = bare("--socket", tmp_path / "s", "health")
    assert (outcome.code, outcome.out) == (3, "")
    assert bare("--socket", tmp_path / "s", "health", "--wait", 0.3).code == 3


def test_waiting_until_it_is_ready(cli: Cli, daemon: LittleDaemon) -> None:
    daemon.health = [STARTING, STARTING, READY]
    assert cli("health", "--wait", 60).code == 0
    assert daemon.count(Health) == 3
    daemon.health = [STARTING]
    assert cli("health", "--wait", 0.3).code == 1


def test_waiting_for_a_daemon_that_comes(bare: Cli, model_folder: Path, tmp_path: Path) -> None:
    codes: list[int] = []
    path = tmp_path / "s"
    arguments = ["--socket", str(path), "health", "--wait", "60"]
    waiting = threading.Thread(target=lambda: codes.append(CliRunner().invoke(main, arguments).exit_code))
    waiting.start()
    with LittleDaemon(path, model_folder):
        waiting.join()
    assert codes == [0]


# ---- stats ---------------------------------------------------------------------------------------------------------


def test_stats(cli: Cli) -> None:
    lines = dict(line.split() for line in cli("stats").out.splitlines())
    assert lines == {"uptime_s": "3700", "running": "1", "waiting": "2", "waiting_tokens": "30", "connections": "4",
                     "kv_slabs.free": "6", "kv_slabs.leased": "2", "kv_slabs.total": "8",
                     "generation_tokens_total": "100", "worker.0.kv_leases": "6"}
    body = cli("stats", "--json").json
    assert body["counters"] == {"generation_tokens_total": 100.0}
    assert body["kv_slabs"]["total"] == 8


def test_every_field_of_the_reply_is_a_row() -> None:
    names = {name.partition(".")[0] for name, _ in stats_rows(STATS)}
    fields = {spec.name for spec in StatsReply.SPECS}
    assert names | {"counters", "workers", "experts", "expert_tokens"} >= fields  # of experts there is a picture


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 30, 5000 << 30)] == [
        "0 B", "1023 B", "2 KiB", "5 MiB", "3.0 GiB", "5000.0 GiB"]


# ---- top -----------------------------------------------------------------------------------------------------------


def sample(at: float, health: HealthReply = READY, **stats: object) -> Sample:
    return Sample(at, health, replace(STATS, **stats), MODEL)


def picture(before: Sample | None, now: Sample, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(frame(before, now))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def worker(**numbers: float) -> tuple[dict[str, float], ...]:
    return ({"running": 1.0, "max_seqs": 32.0, "kv_leases": 6.0, **numbers},)


def test_the_picture() -> None:
    counters = {"generation_tokens_total": 350.0, "prefix_cache_queries_total": 40.0, "prefix_cache_hits_total": 10.0}
    now = sample(102.0, counters=counters, workers=worker(steps=60.0, rows=80.0, busy_us=1.5e6), uptime_s=3702.0)
    text = picture(sample(100.0, workers=worker(steps=20.0, rows=20.0, busy_us=0.5e6)), now)
    assert "colibri tiny  ready  up 1 h 1 min" in text
    assert "running 1 " in text
    assert "waiting 2 (30 tokens)" in text
    assert "tokens out 125.0/s" in text
    assert "cache hits 25%" in text
    assert "free 6  leased 2" in text
    assert ["0", "busy", "1/32", "6", "20.0", "30.0", "50%", "3.0", "GiB", "2", "7"] in [
        line.split() for line in text.splitlines()]
    assert all(len(line) <= 80 for line in text.splitlines())


def test_no_rates_without_two_samples_of_one_life() -> None:
    now = sample(100.0, uptime_s=5.0)
    assert "tokens out –/s" in picture(None, now)
    assert "tokens out –/s" in picture(sample(99.0, uptime_s=50.0), now), "the daemon was restarted"
    assert rate(now, now, "generation_tokens_total") is None


def test_a_worker_that_was_replaced_has_no_rates() -> None:
    before, now = sample(99.0, workers=worker(steps=60.0)), sample(100.0, workers=worker(steps=2.0))
    assert "-58" not in picture(before, now)


@pytest.mark.parametrize(("health", "expected"), [
    (STARTING, "starting: the model is being loaded"),
    (replace(READY, workers=(WorkerHealth(slot=0),)), "down"),
    (replace(READY, workers=(WorkerHealth(slot=0, up=True, busy=True, progress_age_ms=4200.0),)), "silent 4 s"),
    (replace(READY, state="a new [red]state"), "a new [red]state"),
])
def test_states(health: HealthReply, expected: str) -> None:
    assert expected in picture(None, sample(1.0, health))


def test_an_empty_reply_can_be_drawn() -> None:
    text = picture(None, Sample(1.0, HealthReply(live=True, ready=True, state="ready"), StatsReply(uptime_s=0), MODEL))
    assert "KV cache: nothing known yet" in text


@given(st.lists(st.integers(0, 1000), min_size=1).filter(any), st.integers(1, 100))
def test_widths_of_a_bar(counts: list[int], width: int) -> None:
    widths = shares([float(c) for c in counts], width)
    assert sum(widths) == width
    assert all(abs(w - c / sum(counts) * width) <= 1 for w, c in zip(widths, counts, strict=True))


def test_durations() -> None:
    assert [duration(s) for s in (0, 59.9, 60, 3700, 90061)] == ["0 s", "59 s", "1 min 0 s", "1 h 1 min", "1 d 1 h"]


def test_top_once(cli: Cli, daemon: LittleDaemon) -> None:
    daemon.stats = [STATS, replace(STATS, counters={"generation_tokens_total": 300.0})]
    began = time.monotonic()
    outcome = cli("top", "--once", "--interval", 0.2)
    assert time.monotonic() - began >= 0.2
    assert outcome.code == 0
    shown = float(outcome.out.partition("tokens out ")[2].partition("/s")[0])
    assert 0 < shown <= 200 / 0.2
