"""The declaration of all metrics: names as Prometheus wants them, labels whose values are known, room in the pages."""

from __future__ import annotations

import re

import pytest
from colibri_daemon.common.counters import LAYOUTS
from colibri_daemon.common.metrics import BY_NAME, METRICS, Kind, Metric, Source
from colibri_daemon.common.pages import COUNTERS_BYTES, COUNTERS_HEADER

each = pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)


def test_each_name_is_there_once() -> None:
    assert len(BY_NAME) == len(METRICS)


@each
def test_a_name_says_its_kind_and_unit(metric: Metric) -> None:
    assert re.fullmatch("[a-z][a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert not metric.name.endswith(("_bucket", "_count", "_sum"))
    assert metric.help.endswith(".")


@each
def test_a_label_has_known_values(metric: Metric) -> None:
    assert len(set(metric.series)) == len(metric.series)
    assert all(len(values) == len(metric.labels) for values in metric.series) or metric.info
    assert len(metric.series) <= 40
    assert not {"le", "model_name", "worker"} & set(metric.labels)
    assert all(re.fullmatch("[A-Za-z0-9_]+", value) for values in metric.series for value in values)


@each
def test_buckets_grow(metric: Metric) -> None:
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))


@each
def test_only_pages_of_workers_tell_them_apart(metric: Metric) -> None:
    assert not metric.worker or metric.source in (Source.WORKER, Source.SLOT, Source.METRICS)
    assert metric.combine == "sum" or (metric.kind is Kind.GAUGE and not metric.worker)


@pytest.mark.parametrize("source", LAYOUTS, ids=lambda source: source.name)
def test_a_layout_has_room_and_no_overlap(source: Source) -> None:
    layout = LAYOUTS[source]
    assert COUNTERS_HEADER + 8 * layout.size <= COUNTERS_BYTES
    taken: set[int] = set()
    for metric in layout.metrics:
        for values in metric.series:
            first = layout.places[(metric.name, *values)]
            words = set(range(first, first + metric.words))
            assert not words & taken
            assert (metric.kind is Kind.GAUGE) == (first < layout.gauges)
            taken |= words
    assert taken == set(range(layout.size))


def test_layouts_differ() -> None:
    assert len({layout.digest for layout in LAYOUTS.values()}) == len(LAYOUTS)
    assert all(layout.digest for layout in LAYOUTS.values())


def test_numbers_of_vllm_keep_their_names() -> None:
    """A dashboard made for vLLM works when vllm: is replaced by colibri_."""
    assert {
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
        "prompt_tokens_total", "generation_tokens_total", "request_success_total", "time_to_first_token_seconds",
        "inter_token_latency_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens",
        "request_params_max_tokens", "prefix_cache_queries_total", "prefix_cache_hits_total", "cache_config_info",
    } <= BY_NAME.keys()  # fmt: skip
    routers = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info")
    assert all(len(BY_NAME[name].series) == 1 and not BY_NAME[name].worker for name in routers)
