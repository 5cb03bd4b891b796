"""The dashboards as tables of panels; writes overview.json and workers.json beside this file.

    python deploy/grafana/make.py            writes them
    python deploy/grafana/make.py --check    exit code 1 if they are not up to date

To use them: import the files in Grafana (Dashboards, New, Import) and choose a Prometheus data source that scrapes the
daemon as ../prometheus/prometheus.yml does. Every query is run against a real daemon by loadtest/dashboards.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24  # of Grafana's grid
ONE = 'instance="$instance"'


@dataclass(frozen=True)
class Query:
    """legend: of each series, with {{label}}s. Grafana puts the dashboard's step into $__rate_interval."""

    expr: str
    legend: str = ""
    format: str = "time_series"


@dataclass(frozen=True)
class Panel:
    """kind: a Grafana panel type."""

    title: str
    kind: str
    unit: str
    queries: tuple[Query, ...]
    help: str = ""
    width: int = 8
    height: int = 8
    stack: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Per second, added up over all labels but these."""
    labels = ONE + (f",{where}" if where else "")
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{labels}}}[$__rate_interval]))"


def quantile(share: float, histogram: str, where: str = "") -> str:
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', 'le', where)})"


def mean(histogram: str) -> str:
    return f"{rate(f'{histogram}_sum')} / ({rate(f'{histogram}_count')} > 0)"


def lines(title: str, unit: str, *queries: tuple[str, str], **more: Any) -> Panel:
    return Panel(title, "timeseries", unit, tuple(Query(*query) for query in queries), **more)


def stacked(title: str, unit: str, *queries: tuple[str, str], **more: Any) -> Panel:
    return lines(title, unit, *queries, stack=True, **more)


def value(title: str, unit: str, expr: str, **more: Any) -> Panel:
    return Panel(title, "stat", unit, (Query(expr),), width=3, height=4, **more)


def heatmap(title: str, histogram: str, help: str) -> Panel:
    query = Query(rate(f"{histogram}_bucket", "le"), "{{le}}", "heatmap")
    return Panel(title, "heatmap", "s", (query,), help, width=12)


def percentiles(title: str, histogram: str, help: str) -> Panel:
    return lines(title, "s", *((quantile(share, histogram), f"p{share:.0%}"[:-1]) for share in (.5, .95, .99)),
                 (mean(histogram), "mean"), help=help)


OVERVIEW = (
    Row("Now", (
        value("Ready", "bool", f"colibri_ready{{{ONE}}}"),
        value("Running", "short", f"sum(colibri_num_requests_running{{{ONE}}})"),
        value("Waiting", "short", f"sum(colibri_num_requests_waiting{{{ONE}}})"),
        value("Tokens out", "short", rate("colibri_generation_tokens_total"), help="Per second."),
        value("TTFT p95", "s", quantile(.95, "colibri_time_to_first_token_seconds")),
        value("KV live", "percentunit", f"max(colibri_kv_cache_usage_perc{{{ONE}}})"),
        value("Prefix hits", "percentunit", f"{rate('colibri_prefix_cache_hits_total')} / "
              f"({rate('colibri_prefix_cache_queries_total')} > 0)"),
        value("Workers up", "short", f"sum(colibri_worker_up{{{ONE}}})"),
    )),
    Row("Traffic", (
        stacked("Requests ended, by how", "reqps", (rate("colibri_request_success_total", "finished_reason"),
                                                    "{{finished_reason}}")),
        lines("Tokens", "short", (rate("colibri_generation_tokens_total"), "out"),
              (rate("colibri_prompt_tokens_total"), "prompts"),
              (rate("colibri_prefix_cache_hits_total"), "of them cached"), help="Per second."),
        lines("Requests", "short", (f"sum(colibri_num_requests_running{{{ONE}}})", "running"),
              (f"sum(colibri_num_requests_waiting{{{ONE}}})", "waiting"),
              help="A full batch with nobody waiting is what one wants."),
    )),
    Row("Latency", (
        heatmap("Time to first token", "colibri_time_to_first_token_seconds", "From arrival to the first token."),
        heatmap("Time between tokens", "colibri_inter_token_latency_seconds", "What a reader sees."),
        percentiles("Time to first token", "colibri_time_to_first_token_seconds", "Queue and prefill."),
        percentiles("Time between tokens", "colibri_inter_token_latency_seconds",
                    "Grows with the batch, and with prompts in between."),
        percentiles("Whole requests", "colibri_e2e_request_latency_seconds", "From arrival to the end."),
        lines("Where a request's time goes (mean)", "s",
              (mean("colibri_request_queue_time_seconds"), "queue"),
              (mean("colibri_request_prefill_time_seconds"), "prefill"),
              (mean("colibri_request_decode_time_seconds"), "decode")),
        lines("Queue", "s", (quantile(.95, "colibri_request_queue_time_seconds"), "p95"),
              (quantile(.5, "colibri_request_queue_time_seconds"), "p50")),
        lines("Waiting tokens", "short", (f"sum(colibri_waiting_tokens{{{ONE}}})", "tokens"),
              help="To be computed before those that wait have their first token."),
    )),
    Row("KV cache", (
        stacked("Slabs by state", "short", (f"sum by (state) (colibri_kv_slabs{{{ONE}}})", "{{state}}"),
                help="live and cached are the cache at work. What is short: free and cached near 0."),
        lines("Prefix cache", "percentunit", (f"{rate('colibri_prefix_cache_hits_total')} / "
                                              f"({rate('colibri_prefix_cache_queries_total')} > 0)", "tokens found")),
        stacked("Slabs taken away", "short", (rate("colibri_kv_evictions_total", "reason"), "{{reason}}"),
                (rate("colibri_num_preemptions_total"), "preemptions"), help="Per second."),
        lines("KV pool's answers (p99)", "s", *((quantile(.99, "colibri_kv_call_duration_seconds", f'op="{op}"'), op)
                                                for op in ("attach", "alloc", "commit"))),
    )),
    Row("Workers and experts", (
        lines("Time in steps", "percentunit", (f"rate(colibri_worker_busy_seconds_total{{{ONE}}}[$__rate_interval])",
                                               "worker {{worker}}"), help="1: it computes all the time."),
        lines("Steps (p95)", "s", *((quantile(.95, "colibri_step_duration_seconds", f'kind="{kind}"'), kind)
                                    for kind in ("decode", "mixed", "prefill")),
              (f"max(colibri_stall_bound_seconds{{{ONE}}})", "longest intended")),
        lines("Tokens in a step (mean)", "short", (mean("colibri_iteration_tokens"), "tokens")),
        lines("Busiest expert over mean", "short", (f"colibri_expert_load_imbalance_ratio{{{ONE}}}", "{{layers}}"),
              help="1 is even. colibri-client stats --experts shows each expert."),
        lines("Restarts", "short", (f"sum by (worker, reason) (increase(colibri_worker_restarts_total{{{ONE}}}"
                                    "[$__rate_interval]))", "worker {{worker}} {{reason}}"),
              (f"sum by (process) (increase(colibri_child_restarts_total{{{ONE}}}[$__rate_interval]))",
               "{{process}}")),
        lines("Memory", "bytes", (f"colibri_worker_resident_memory_bytes{{{ONE}}}", "worker {{worker}}"),
              (f"process_resident_memory_bytes{{{ONE},job=\"$job\"}}", "supervisor"),
              help="Weights and KV cache are shared, and counted in each."),
    )),
    Row("Errors and clients", (
        stacked("Refused", "reqps", (rate("colibri_admission_rejections_total", "reason"), "{{reason}}")),
        stacked("Errors sent", "reqps", (rate("colibri_request_errors_total", "code"), "{{code}}")),
        lines("Integrity", "short",
              (rate("colibri_kv_invariant_violations_total"), "invariant violations"),
              (rate("colibri_prefix_cache_rejects_total", where='reason="token_mismatch"'), "hash mismatches"),
              (rate("colibri_kv_quarantined_total"), "damaged slabs"),
              (rate("colibri_poison_requests_total"), "poison requests"), help="All of it should be 0."),
        lines("Connections", "short", (f"sum by (state) (colibri_connections{{{ONE}}})", "{{state}}")),
        lines("Frames", "short", (rate("colibri_frames_total", "direction"), "{{direction}}"), help="Per second."),
        lines("Unread output", "bytes", (f"sum(colibri_output_buffer_bytes{{{ONE}}})", "bytes"),
              help="What clients have not read yet."),
    )),
)

WORKERS = (
    Row("Load", (
        lines("Requests", "short", (f"colibri_worker_requests_running{{{ONE}}}", "worker {{worker}}")),
        lines("Time in steps", "percentunit", (f"rate(colibri_worker_busy_seconds_total{{{ONE}}}[$__rate_interval])",
                                               "worker {{worker}}")),
        lines("CPU", "short", (f"rate(colibri_worker_cpu_seconds_total{{{ONE}}}[$__rate_interval])",
                               "worker {{worker}}"), help="Cores."),
        lines("Steps", "short", (f"rate(colibri_worker_steps_total{{{ONE}}}[$__rate_interval])", "worker {{worker}}"),
              help="Per second."),
        lines("Tokens computed", "short", (f"rate(colibri_worker_rows_total{{{ONE}}}[$__rate_interval])",
                                           "worker {{worker}}"), help="Per second; prompts and output."),
        lines("Tokens in a step", "short", (
            f"rate(colibri_worker_rows_total{{{ONE}}}[$__rate_interval]) / "
            f"(rate(colibri_worker_steps_total{{{ONE}}}[$__rate_interval]) > 0)", "worker {{worker}}")),
    )),
    Row("Steps of all workers", (
        heatmap("Duration", "colibri_step_duration_seconds", "A mixed step has a piece of a prompt in it."),
        heatmap("Longest wait for a prompt", "colibri_decode_stall_seconds",
                "What running requests waited in the longest step of each prompt that was computed beside them."),
        lines("Steps by what they compute", "short", (rate("colibri_step_duration_seconds_count", "kind"), "{{kind}}"),
              help="Per second."),
        lines("Sat out for want of a slab", "short", (rate("colibri_kv_free_list_misses_total"), "rows"),
              help="Decode rows per second."),
        lines("Tokens routed to experts", "short", (rate("colibri_expert_tokens_total"), "tokens × experts"),
              help="Per second, over all layers."),
    )),
    Row("Memory and life", (
        lines("Resident memory", "bytes", (f"colibri_worker_resident_memory_bytes{{{ONE}}}", "worker {{worker}}")),
        lines("Slabs of its own", "short", (f"colibri_kv_leases{{{ONE}}}", "worker {{worker}}")),
        lines("Up", "bool", (f"colibri_worker_up{{{ONE}}}", "worker {{worker}}")),
        lines("Since the last progress", "s", (
            f"time() - (colibri_worker_progress_timestamp_seconds{{{ONE}}} > 0)", "worker {{worker}}")),
        stacked("Ends that nobody asked for", "short", (
            f"sum by (reason) (increase(colibri_worker_restarts_total{{{ONE}}}[$__rate_interval]))", "{{reason}}")),
        value("Last start took", "s", f"max(colibri_weights_load_seconds{{{ONE}}})"),
    )),
)


def dashboard(title: str, uid: str, rows: tuple[Row, ...]) -> dict[str, Any]:
    return {
        "title": title, "uid": uid, "schemaVersion": 38, "version": 1, "editable": True, "tags": ["colibri"],
        "time": {"from": "now-1h", "to": "now"}, "refresh": "10s", "timezone": "browser",
        "templating": {"list": [
            {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
            _variable("job", "label_values(colibri_build_info, job)"),
            _variable("instance", 'label_values(colibri_build_info{job="$job"}, instance)'),
        ]},
        "panels": list(_placed(rows)),
    }  # fmt: skip


def _variable(name: str, query: str) -> dict[str, Any]:
    return {"name": name, "label": name.capitalize(), "type": "query", "datasource": DATASOURCE, "query": query,
            "refresh": 2, "sort": 1}  # fmt: skip


def _placed(rows: tuple[Row, ...]) -> Iterator[dict[str, Any]]:
    """Left to right, as many as fit, one line below the other."""
    number = y = 0
    for row in rows:
        number += 1
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [],
               "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}  # fmt: skip
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            number += 1
            yield _panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": panel.height})
            x, height = x + panel.width, max(height, panel.height)
        y += height


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.kind == "timeseries":
        defaults |= {"min": 0, "custom": {
            "fillOpacity": 20 if panel.stack else 0, "stacking": {"mode": "normal" if panel.stack else "none"}}}
    return {
        "id": number, "type": panel.kind, "title": panel.title, "description": panel.help, "gridPos": place,
        "datasource": DATASOURCE, "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS.get(panel.kind, {}),
        "targets": [{"refId": "ABCDEFGH"[i], "datasource": DATASOURCE, "expr": query.expr, "format": query.format,
                     "legendFormat": query.legend or "__auto"} for i, query in enumerate(panel.queries)],
    }  # fmt: skip


_OPTIONS: dict[str, dict[str, Any]] = {
    "heatmap": {"calculate": False, "yAxis": {"unit": "s"}, "color": {"mode": "scheme", "scheme": "Oranges"}},
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}},
}
DASHBOARDS = {
    "overview.json": ("Colibri", "colibri-overview", OVERVIEW),
    "workers.json": ("Colibri workers", "colibri-workers", WORKERS),
}


def text(name: str) -> str:
    return json.dumps(dashboard(*DASHBOARDS[name]), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    if not parser.parse_args().check:
        for name in DASHBOARDS:
            (FOLDER / name).write_text(text(name), encoding="utf-8")
    old = [name for name in DASHBOARDS if (FOLDER / name).read_text(encoding="utf-8") != text(name)]
    for name in old:
        print(f"{name}: not up to date; run python deploy/grafana/make.py", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
