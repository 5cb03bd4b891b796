"""The real daemon as Prometheus sees it: what is counted, that nothing is lost and no series comes or goes when
processes die, are replaced or reload."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from colibri_client import Admin, Client
from colibri_client.errors import TokenOutOfRange
from colibri_daemon.common.counters import LAYOUTS
from colibri_daemon.common.metrics import PREFIX, Kind, Source
from fixtures.daemon import PATIENCE, Daemon
from fixtures.models import Models
from fixtures.scrape import Scraped, fetch, free_port

PROMPT = list(range(5, 105))


@contextmanager
def serving(model: Path, **settings: object) -> Iterator[tuple[Daemon, str]]:
    """A daemon and where its metrics are."""
    address = str(settings.pop("metrics", f"127.0.0.1:{free_port()}"))
    with Daemon(model, **({"workers": 2, "threads": 1, "metrics": address} | settings)) as daemon:
        yield daemon, address


def at_rest(daemon: Daemon, address: str) -> Scraped:
    """Once nobody is connected any more."""
    return daemon.until(lambda: (now := Scraped.of(address)).sum("colibri_connections") == 0 and now)


def ask(client: Client, count: int = 1, tokens: int = 20) -> None:
    for number in range(count):
        client.complete([7 + number, *PROMPT], max_tokens=tokens, ignore_eos=True)


def kill(daemon: Daemon, role: str) -> None:
    """And waits for the next one."""
    pid = daemon.pid_of(role)
    os.kill(pid, signal.SIGKILL)
    daemon.until(lambda: daemon.titles().get(pid) is None and role in daemon.titles().values())


def none_fell(before: Scraped, after: Scraped) -> None:
    later = after.counters()
    assert [key for key, value in before.counters().items() if later[key] < value] == []


def balanced(seen: Scraped) -> float:
    """Requests that were started, which all have ended."""
    started = seen["colibri_requests_started_total"]
    assert seen.sum("colibri_request_success_total") == started
    return started


# ---- what is counted -------------------------------------------------------------------------------------------------


def test_what_requests_leave_behind(models: Models) -> None:
    with serving(models.tiny("q4")) as (daemon, address):
        with Client(daemon.socket) as client:
            ask(client, 3)
            ask(client, 3)  # the same prompts
            with pytest.raises(TokenOutOfRange):
                client.complete([1 << 20])
            reply = client.stats(experts=True)
            health = client.health()
        seen = at_rest(daemon, address)
        assert balanced(seen) == 6
        assert seen.sum("colibri_request_success_total", finished_reason="length") == 6
        assert seen["colibri_prompt_tokens_total"] == 6 * 101
        assert seen["colibri_generation_tokens_total"] == 6 * 20
        assert seen["colibri_prefix_cache_hits_total"] == 3 * 64
        for name, times in (("time_to_first_token_seconds", 6), ("inter_token_latency_seconds", 6 * 19),
                            ("e2e_request_latency_seconds", 6), ("request_decode_time_seconds", 6),
                            ("request_time_per_output_token_seconds", 6), ("kv_block_reuse_gap_seconds", 3)):
            assert seen[f"colibri_{name}_count"] == times, name
        assert seen["colibri_request_cached_tokens_sum"] == 3 * 64
        assert seen.sum("colibri_admission_rejections_total") == seen.sum("colibri_request_errors_total") == 1
        assert seen.sum("colibri_frames_total", direction="in", type="GENERATE") == 7
        assert seen.sum("colibri_frames_total", direction="out", type="DONE") == 6
        assert seen.sum("colibri_step_duration_seconds_count") == seen.sum("colibri_worker_steps_total")
        assert seen["colibri_iteration_tokens_sum"] == seen.sum("colibri_worker_rows_total")
        assert seen["colibri_kv_cache_usage_perc"] == 0
        assert seen.sum("colibri_kv_slabs") == reply.kv_slabs["total"]
        assert seen["colibri_ready"] == seen.sum("colibri_state", state="ready") == 1
        assert seen.sum("colibri_worker_up") == len(health.workers) == 2
        assert abs(seen.sum("colibri_worker_progress_timestamp_seconds", worker="1") - time.time()) < 60
        experts = memoryview(reply.expert_tokens).cast("Q").tolist()
        assert sum(experts) == seen["colibri_expert_tokens_total"] > 0
        assert all(sum(experts[at : at + reply.experts]) == sum(experts) / (len(experts) / reply.experts)
                   for at in range(0, len(experts), reply.experts))  # every layer routes every token


def test_statistics_are_the_same_numbers(models: Models) -> None:
    """STATS_REPLY has every counter of dispatcher and pool under the metric's name."""
    with serving(models.tiny("q4")) as (daemon, address):
        with Client(daemon.socket) as client:
            ask(client, 2)
            daemon.until(lambda: client.stats().counters["prefix_cache_queries_total"] == 202)
            counters = client.stats().counters
            seen = Scraped.of(address)
        for source in (Source.DISPATCHER, Source.KVPOOL):
            for metric in LAYOUTS[source].metrics:
                if metric.kind is Kind.COUNTER and metric.name not in ("frames_total", "connections_total"):
                    told = sum(value for key, value in counters.items() if key.partition("{")[0] == metric.name)
                    assert told == seen.sum(PREFIX + metric.name), metric.name


def test_gauges_follow_what_happens(models: Models) -> None:
    with serving(models.tiny("q4"), workers=1, max_seqs=1) as (daemon, address), Client(daemon.socket) as client:
        streams = [client.generate(PROMPT, max_tokens=5000, ignore_eos=True, seed=seed) for seed in range(3)]
        waiting = [threading.Thread(target=list, args=(stream,)) for stream in streams]
        for thread in waiting:
            thread.start()
        seen = daemon.until(lambda: (now := Scraped.of(address))["colibri_num_requests_waiting"] == 2 and now)
        assert seen["colibri_num_requests_running"] == seen.sum("colibri_worker_requests_running") == 1
        assert seen["colibri_waiting_tokens"] == 2 * len(PROMPT)
        assert seen.sum("colibri_connections", state="active") == 1
        assert daemon.until(lambda: Scraped.of(address)["colibri_kv_cache_usage_perc"] > 0)
        for stream in streams:
            stream.cancel()
        for thread in waiting:
            thread.join()
        seen = daemon.until(lambda: (now := Scraped.of(address))["colibri_num_requests_running"] == 0 and now)
        assert seen["colibri_num_requests_waiting"] == seen["colibri_waiting_tokens"] == 0
        assert balanced(seen) == 3
        assert seen.sum("colibri_request_success_total", finished_reason="abort") == 3
        assert seen.sum("colibri_cancel_latency_seconds_count", phase="queued") == 2
        assert seen.sum("colibri_cancel_latency_seconds_count", phase="decode") == 1


# ---- processes come and go -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.full)])
def test_restarts_of_workers_neither_make_series_nor_lose_counts(models: Models, count: int) -> None:
    """No request gives up and comes again, however slowly workers start."""
    with serving(models.tiny("q4"), queue_seconds=3600) as (daemon, address):
        with Client(daemon.socket) as client:
            ask(client)
            first = before = Scraped.of(address)
            for number in range(count):
                kill(daemon, f"worker {number % 2}")
                ask(client, 2, tokens=4)
                if number % 10 == 9:
                    now = Scraped.of(address)
                    none_fell(before, now)
                    assert now.series == first.series
                    before = now
        seen = at_rest(daemon, address)
        assert seen.sum("colibri_worker_restarts_total") == count
        assert balanced(seen) == 1 + 2 * count
        assert seen["colibri_generation_tokens_total"] == 20 + 8 * count
        assert seen.sum("colibri_worker_rows_total") == seen["colibri_iteration_tokens_sum"]


@pytest.mark.parametrize("role", ["metrics", "kvpool", "dispatcher"])
def test_the_death_of_another_process_loses_nothing(models: Models, role: str) -> None:
    with serving(models.tiny("q4")) as (daemon, address):
        with Client(daemon.socket) as client:
            ask(client, 3)
        before = at_rest(daemon, address)
        kill(daemon, role)
        daemon.wait_ready()
        with Client(daemon.socket) as client:
            ask(client, 3)
        after = daemon.until(lambda: (now := Scraped.of(address)).sum("colibri_connections") == 0
                             and now.sum("colibri_worker_up") == 2 and now)  # fmt: skip
        none_fell(before, after)
        assert after.series == before.series
        assert balanced(after) == 6
        assert after["colibri_prefix_cache_hits_total"] >= 3 * 64
        assert after.sum("colibri_child_restarts_total", process=role) == 1


def test_requests_that_die_with_the_dispatcher_have_ended(models: Models) -> None:
    with serving(models.tiny("q4")) as (daemon, address):
        with Client(daemon.socket) as client:
            stream = client.generate(PROMPT, max_tokens=400, ignore_eos=True)
            next(iter(stream))
            kill(daemon, "dispatcher")
            rest = list(stream)  # by another request, which resumes it
        assert len(rest) == 399
        seen = at_rest(daemon, address)
        assert balanced(seen) == 2
        assert seen.sum("colibri_request_success_total", finished_reason="error") == 1
        assert seen["colibri_num_requests_running"] == 0


def test_a_reload_goes_on_counting(models: Models, tmp_path: Path) -> None:
    """With the same model, and with another one, whose experts are counted by themselves; not with another address."""
    config = tmp_path / "colibrid.toml"
    first, second = (shutil.copytree(models.tiny(form), tmp_path / name)
                     for form, name in (("q4", "one"), ("q8", "two")))
    address = f"127.0.0.1:{free_port()}"

    def configure(model: Path, where: str = address) -> None:
        config.write_text(f'model = "{model}"\nworkers = 2\nthreads = 1\nmetrics = "{where}"\n')

    def reload(client: Client, daemon: Daemon) -> Scraped:
        """After it has ended, and old processes are gone."""
        at = Scraped.of(address)["colibri_config_last_reload_success_timestamp_seconds"]
        daemon.signal(signal.SIGHUP)
        daemon.until(lambda: Scraped.of(address)["colibri_config_last_reload_success_timestamp_seconds"] > at)
        daemon.until(lambda: sorted(daemon.titles().values()) == ["dispatcher", "kvpool", "metrics", "supervisor",
                                                                  "worker 0", "worker 1"])
        ask(client, 2)
        return daemon.until(lambda: (now := Scraped.of(address)).sum("colibri_worker_up") == 2 and now)

    configure(first)
    with Daemon(None, config=config) as daemon, Client(daemon.socket) as client:
        ask(client, 2)
        before = Scraped.of(address)
        same = reload(client, daemon)
        none_fell(before, same)
        assert same.series == before.series
        configure(second)
        other = reload(client, daemon)
        none_fell(same, other)
        assert other.series == same.series  # both models have one name
        assert other["colibri_requests_started_total"] == same["colibri_requests_started_total"] + 2
        counted = sum(memoryview(client.stats(experts=True).expert_tokens).cast("Q"))
        assert counted == other["colibri_expert_tokens_total"] - same["colibri_expert_tokens_total"] > 0
        configure(second, "127.0.0.1:1")
        daemon.signal(signal.SIGHUP)
        daemon.until(lambda: Scraped.of(address)["colibri_config_last_reload_success"] == 0)
        (line,) = daemon.log(level="error", msg="reload failed, nothing was changed")
        assert "metrics cannot be changed while the daemon runs" in line["reason"]


def test_new_processes_of_all_kinds_go_on_counting(models: Models) -> None:
    """The old dispatcher finishes its stream beside the new one: both count, each in a page of its own."""
    with serving(models.tiny("q4")) as (daemon, address), Client(daemon.socket) as client:
        ask(client, 2)
        stream = client.generate(PROMPT, max_tokens=100_000, ignore_eos=True)
        next(iter(stream))
        before = Scraped.of(address)
        with Admin(daemon.socket.with_name("s.admin")) as admin:
            admin.reload(everything=True, timeout=PATIENCE)
        with Client(daemon.socket) as other:
            ask(other, 2)
            both = Scraped.of(address)
            none_fell(before, both)
            assert both.series == before.series
            assert sum(title == "dispatcher" for title in daemon.titles().values()) == 2
            daemon.until(lambda: Scraped.of(address)["colibri_num_requests_running"] == 1)
        stream.cancel()
        assert sum(1 for _ in stream) > 0
        client.close()
        daemon.until(lambda: sorted(daemon.titles().values()).count("dispatcher") == 1)
        after = at_rest(daemon, address)
        none_fell(both, after)
        assert after.series == before.series
        assert balanced(after) == 5
        assert after.sum("colibri_child_restarts_total") == after.sum("colibri_worker_restarts_total") == 0


# ---- how it runs -----------------------------------------------------------------------------------------------------


def test_it_goes_first_if_it_may(models: Models) -> None:
    """Before engine threads, under real-time scheduling."""
    own = os.sched_getscheduler(0)
    may = own == os.SCHED_OTHER and subprocess.run(["chrt", "--rr", "1", "true"], capture_output=True).returncode == 0
    with serving(models.tiny("q4")) as (daemon, _):
        pid = daemon.pid_of("metrics")
        daemon.until(lambda: os.sched_getscheduler(pid) == (os.SCHED_RR if may else own))
        assert {os.sched_getscheduler(other) for other in daemon.titles() if other != pid} == {own}


# ---- where it listens ------------------------------------------------------------------------------------------------


def test_a_unix_socket(models: Models, tmp_path: Path) -> None:
    path = tmp_path / "m"
    with serving(models.tiny("q4"), metrics=f"unix:{path}", socket_mode="0600") as (_, address):
        assert path.stat().st_mode & 0o777 == 0o600
        assert Scraped.of(address)["colibri_ready"] == 1
    assert not path.exists()


def test_health_for_whoever_asks_by_http(models: Models) -> None:
    with serving(models.tiny("q4"), drain_seconds=30) as (daemon, address), Client(daemon.socket) as client:
        assert (fetch(address, "/health/live"), fetch(address, "/health/ready")) == ((200, "live\n"), (200, "ready\n"))
        stream = client.generate(PROMPT, max_tokens=30_000, ignore_eos=True)
        next(iter(stream))
        daemon.signal(signal.SIGTERM)
        status, text = daemon.until(lambda: (answer := fetch(address, "/health/ready"))[0] == 503 and answer)
        assert "asked to stop" in text
        assert fetch(address, "/health/live")[0] == 200
        stream.cancel()
        assert daemon.ended() == 0


def test_an_address_in_use_is_said_at_once(models: Models) -> None:
    with serving(models.tiny("q4")) as (_, address):
        with Daemon(models.tiny("q4"), wait=False, metrics=address) as second:
            assert second.ended() == 5
            (line,) = second.log(level="error")
        assert address in line["error"]
        assert "--metrics" in line["error"]


def test_without_it_there_is_no_process(models: Models) -> None:
    with Daemon(models.tiny("q4"), threads=1) as daemon:
        assert "metrics" not in daemon.titles().values()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is Debian's package prometheus")
def test_promtool_finds_nothing(models: Models) -> None:
    with serving(models.tiny("q4")) as (daemon, address):
        with Client(daemon.socket) as client:
            ask(client, 2)
        done = subprocess.run(["promtool", "check", "metrics"], input=fetch(address)[1], capture_output=True, text=True,
                              check=False)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
