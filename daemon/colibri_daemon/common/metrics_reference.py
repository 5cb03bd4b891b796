"""METRICS.md: every metric with its labels, made from the declaration by reference.py."""

from __future__ import annotations

from .metrics import METRICS, Kind, Metric, Source

_WRITERS = {
    Source.DISPATCHER: "dispatcher", Source.KVPOOL: "KV pool", Source.WORKER: "workers",
    Source.SUPERVISOR: "supervisor", Source.SLOT: "supervisor", Source.METRICS: "metrics process",
}  # fmt: skip
_MANY = 9  # values of a label, from which on only some are shown

_INTRODUCTION = """# Metrics

<!-- Made by {command}. -->

With `metrics = "127.0.0.1:9464"` (or another address, or `unix:PATH`) the daemon answers `GET /metrics` in Prometheus'
text format. `deploy/prometheus` has the scrape configuration, recording rules and alerts, `deploy/grafana` the
dashboards.

* Each process counts in its own page of shared memory; the metrics process reads them. Counters go on where the process
  before left them, so they fall only when the service is started again or a new version of the package declares other
  metrics. Once the model is known the series are the same at every scrape; only a reload with another model or another
  number of workers changes them.
* Gauges are at most 50 ms old. What the supervisor judges (`state`, `ready`, `worker_up`) is told when it changes.
* Once nothing is live, the sum of `request_success_total` over `finished_reason` is `requests_started_total`.
* `model_name` is the model that serves; `worker` is a slot, not a process. Times are seconds, sizes bytes.
* Names without `colibri_` stand in STATS_REPLY too (`colibri-client stats`), as far as the dispatcher and the KV pool
  count them, but for histograms.
"""


def markdown(command: str) -> str:
    lines = [_INTRODUCTION.format(command=command)]
    for title, wanted in (("Counters and gauges", False), ("Histograms", True)):
        last = "bounds" if wanted else "kind"
        lines += [f"## {title}", "", f"| name | labels | {last} | counted by | meaning |", "|---|---|---|---|---|"]
        lines += [_row(metric) for metric in METRICS if (metric.kind is Kind.HISTOGRAM) == wanted]
        lines.append("")
    return "\n".join(lines)


def _row(metric: Metric) -> str:
    about = " ".join(f"{bound:g}" for bound in metric.buckets) or metric.kind.value
    labels = "<br>".join(_label(metric, name) for name in metric.label_names) or "–"
    return f"| `{metric.full_name}` | {labels} | {about} | {_WRITERS[metric.source]} | {metric.help} |"


def _label(metric: Metric, name: str) -> str:
    if metric.info or name not in metric.labels:
        return f"`{name}`"
    values = list(dict.fromkeys(series[metric.labels.index(name)] for series in metric.series))
    shown = [*values[:_MANY], f"… ({len(values)})"] if len(values) > _MANY + 1 else values
    return f"`{name}`: {', '.join(shown)}"
