"""The text of /metrics, held against prometheus_client, promtool and the declaration."""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pages
import pytest
from colibri_daemon.common.counters import LAYOUTS, Counters
from colibri_daemon.common.metrics import BY_NAME, METRICS, Kind, Metric, Source
from colibri_daemon.common.pages import Book
from colibri_daemon.exporter.exposition import Exposition
from colibri_daemon.exporter.scrape import STALE_SECONDS, Scrape, Service
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

GOLDEN = Path(__file__).parent / "small.txt"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

# A declaration of one metric of each shape, and its words.
SMALL = (
    Metric("requests_total", Kind.COUNTER, "All of\nthem, \\ too.", labels=("how",), series=(("a",), ("b",)),
           model=True),
    Metric("load", Kind.GAUGE, "Now, 100% of it.", worker=True),
    Metric("wait_seconds", Kind.HISTOGRAM, "How long.", labels=("kind",), series=(("x",),), buckets=(.01, 1, 2.5)),
    Metric("about_info", Kind.GAUGE, "What it is.", labels=("version",), info=True),
    Metric("process_open_fds", Kind.GAUGE, "Descriptors."),
)
WORDS = {"requests_total": [[3.0, 1e14 + 0.5]], "load": [[0.1], [math.inf]],
         "wait_seconds": [[1.0, 2.0, 0.0, 4.0, 17.25]], "process_open_fds": [[1e-5]]}


def samples(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def test_each_shape_is_as_in_the_recorded_text() -> None:
    text = Exposition('m "1"\\', 2, {"about_info": {"version": "1%"}}, SMALL).text(WORDS)
    assert text.decode() == GOLDEN.read_text()


class OfPrometheus:
    """The same numbers, through the library."""

    def collect(self) -> Iterator[object]:
        counter = CounterMetricFamily("colibri_requests", "All of\nthem, \\ too.", labels=["model_name", "how"])
        counter.add_metric(['m "1"\\', "a"], 3.0)
        counter.add_metric(['m "1"\\', "b"], 1e14 + 0.5)
        gauge = GaugeMetricFamily("colibri_load", "Now, 100% of it.", labels=["worker"])
        gauge.add_metric(["0"], 0.1)
        gauge.add_metric(["1"], math.inf)
        histogram = HistogramMetricFamily("colibri_wait_seconds", "How long.", labels=["kind"])
        histogram.add_metric(["x"], [("0.01", 1.0), ("1", 3.0), ("2.5", 3.0), ("+Inf", 7.0)], 17.25)
        info = GaugeMetricFamily("colibri_about_info", "What it is.", labels=["version"])
        info.add_metric(["1%"], 1)
        yield from (counter, gauge, histogram, info, GaugeMetricFamily("process_open_fds", "Descriptors.", 1e-5))


def test_the_library_says_the_same() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(OfPrometheus())  # type: ignore[arg-type]
    text = Exposition('m "1"\\', 2, {"about_info": {"version": "1%"}}, SMALL).text(WORDS).decode()
    theirs = generate_latest(registry).decode()
    assert samples(text) == pytest.approx(samples(theirs), rel=1e-14, abs=0)
    comments = [sorted(line for line in lines.splitlines() if line.startswith("#")) for lines in (text, theirs)]
    assert comments[0] == comments[1]


@given(st.lists(st.floats(0, 1e15), min_size=2, max_size=2))
def test_numbers_come_back_to_fifteen_digits(values: list[float]) -> None:
    text = Exposition("m", 2, {}, SMALL[1:2]).text({"load": [[value] for value in values]}).decode()
    assert list(samples(text).values()) == [pytest.approx(value, rel=1e-14, abs=0) for value in values]


# ---- the whole of it -------------------------------------------------------------------------------------------------


def test_every_declared_series_is_there_and_no_other() -> None:
    found = samples(pages.scrape(pages.whole(), pages.said()).text().decode())
    expected = set()
    for metric in METRICS:
        names = [metric.full_name]
        if metric.buckets:
            names = [f"{metric.full_name}{end}" for end in ("_bucket", "_sum", "_count")]
        expected |= set(names)
    assert {name for name, _ in found} == expected
    for (name, labels), value in found.items():
        assert not math.isnan(value), name
        assert "worker" not in dict(labels) or dict(labels)["worker"] in ("0", "1")


def test_each_number_stands_at_its_place() -> None:
    """Pages in which every word differs: two workers, added up or apart."""
    found = samples(pages.scrape(pages.whole(), pages.said()).text().decode())
    model = ("model_name", 'tiny "m" 100%')
    for metric in METRICS:
        if metric.source is Source.METRICS or metric.buckets:
            continue
        for values in metric.series:
            word = LAYOUTS[metric.source].places[(metric.name, *values)] + 1.0
            labels = [*zip(metric.labels, values, strict=True), *[model] * metric.model]
            if metric.worker:
                for slot in (0, 1):
                    key = metric.full_name, tuple(sorted([*labels, ("worker", str(slot))]))
                    assert found[key] == word * 10**slot
            else:
                factor = 11 if metric.source is Source.WORKER else 1
                assert found[metric.full_name, tuple(sorted(labels))] == word * factor


def test_buckets_are_cumulative_and_end_at_the_count() -> None:
    found = samples(pages.scrape(pages.whole(), pages.said()).text().decode())
    for metric in (metric for metric in METRICS if metric.buckets):
        series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        for (name, labels), value in found.items():
            if name == f"{metric.full_name}_bucket":
                rest = tuple(label for label in labels if label[0] != "le")
                series.setdefault(rest, []).append((float(dict(labels)["le"]), value))
        assert len(series) == len(metric.series)
        for rest, buckets in series.items():
            counts = [count for _, count in sorted(buckets)]
            assert counts == sorted(counts)
            assert counts[-1] == found[f"{metric.full_name}_count", rest]


def test_derived_numbers() -> None:
    book = Book.make(4)
    pool = Counters(book.take(Source.KVPOOL.value).counters, Source.KVPOOL)
    for state, count in (("live", 30), ("cached", 10), ("free", 60), ("quarantined", 5), ("withheld", 100)):
        pool.set("kv_slabs", count, state=state)
    message = pages.said(1, state="degraded", ready=False, reloaded={"ok": False, "good": 123.5})
    found = samples(pages.scrape(book, message).text().decode())
    assert found["colibri_kv_cache_usage_perc", (("model_name", 'tiny "m" 100%'),)] == 0.3
    assert {dict(labels)["state"]: value for (name, labels), value in found.items() if name == "colibri_state"} == {
        "starting": 0, "ready": 0, "degraded": 1, "draining": 0, "failed": 0}
    assert found["colibri_ready", ()] == 0
    assert found["colibri_config_last_reload_success", ()] == 0
    assert found["colibri_config_last_reload_success_timestamp_seconds", ()] == 123.5
    info = (("isa", "avx2"), ("protocol", "1"), ("version", "1.2.3"))
    assert found["colibri_build_info", info] == 1
    cache = [dict(labels) for name, labels in found if name == "colibri_cache_config_info"]
    assert cache == [{"block_size": "64", "num_gpu_blocks": "99", "num_slabs": "99", "pinned_tokens": "4",
                      "window_tokens": "2048"}]  # fmt: skip
    assert found["colibri_worker_resident_memory_bytes", (("worker", "0"),)] > 1 << 20
    assert found["colibri_worker_cpu_seconds_total", (("worker", "0"),)] > 0
    assert abs(found["colibri_worker_progress_timestamp_seconds", (("worker", "0"),)] - time.time()) < 60
    assert 0 < found["process_open_fds", ()] <= found["process_max_fds", ()]
    assert found["process_start_time_seconds", ()] < time.time()


def test_before_anybody_has_said_anything() -> None:
    found = samples(pages.scrape(Book.make(4), None).text().decode())
    assert found["colibri_ready", ()] == 0
    assert found["colibri_requests_started_total", (("model_name", ""),)] == 0
    assert not [name for name, labels in found if "worker" in dict(labels)]


def test_a_silent_supervisor_makes_nothing_ready() -> None:
    now = [100.0]
    service = Service(lambda: now[0])
    service.update(pages.said())
    assert service.ready
    now[0] += STALE_SECONDS
    assert not service.ready
    assert service.reason == "nothing is known"


def test_pages_of_several_generations_add_up() -> None:
    """Two dispatchers, two workers of one slot; a bound is the largest, and a slot that is no more still counts for
    the whole."""
    book = Book.make(16)
    for count in (1, 10):
        dispatcher = Counters(book.take(Source.DISPATCHER.value).counters, Source.DISPATCHER)
        dispatcher.add("prompt_tokens_total", count)
        dispatcher.set("num_requests_running", count)
        dispatcher.set("stall_bound_seconds", count)
        Counters(book.take(Source.WORKER.value, 0).counters, Source.WORKER).add("worker_rows_total", count)
    gone = Counters(book.take(Source.WORKER.value, 5).counters, Source.WORKER)
    gone.add("worker_rows_total", 100)
    gone.observe("iteration_tokens", 100)
    found = samples(pages.scrape(book, pages.said(1)).text().decode())
    model = (("model_name", 'tiny "m" 100%'),)
    assert found["colibri_prompt_tokens_total", model] == 11
    assert found["colibri_num_requests_running", model] == 11
    assert found["colibri_stall_bound_seconds", ()] == 10
    assert found["colibri_worker_rows_total", (("worker", "0"),)] == 11
    assert ("colibri_worker_rows_total", (("worker", "5"),)) not in found
    assert found["colibri_iteration_tokens_sum", model] == 100


def test_a_new_model_changes_its_name() -> None:
    service, book = Service(time.monotonic), pages.whole()
    scrape = Scrape(book, service, pages.Imbalance(book), 1)
    for model in ("a", "b"):
        service.update(pages.said(about={"model": model}))
        assert f'colibri_prompt_tokens_total{{model_name="{model}"}}' in scrape.text().decode()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is Debian's package prometheus")
def test_promtool_finds_nothing() -> None:
    text = pages.scrape(pages.whole(), pages.said()).text()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_declared_metrics_all_have_a_place() -> None:
    assert {metric.name for layout in LAYOUTS.values() for metric in layout.metrics} == {
        name for name, metric in BY_NAME.items() if metric.source is not Source.METRICS}
