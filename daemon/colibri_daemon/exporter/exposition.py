"""Prometheus' text format, version 0.0.4, from the declaration: the whole text is made once, with places for the
numbers, since which series there are changes only with the model and the workers. So a scrape is one formatting call;
prometheus_client, which makes every line anew, takes 30 times as long. The tests hold it against that library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from ..common.metrics import METRICS, Kind, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = Mapping[str, str]


class Exposition:
    """For so many workers. model: the value of model_name. info: by metric, the labels of those that are 1."""

    def __init__(self, model: str, workers: int, info: Mapping[str, Labels],
                 metrics: Sequence[Metric] = METRICS) -> None:
        self._workers, self._metrics = workers, metrics
        lines = [line for metric in metrics for line in self._lines(metric, model, info)]
        self._template = "\n".join(lines) + "\n"

    def text(self, words: Mapping[str, Sequence[Sequence[float]]]) -> bytes:
        """words: by metric, a page's words of all its series: once, or for each worker. Info metrics have none."""
        numbers: list[float] = []
        for metric in self._metrics:
            if metric.info:
                numbers.append(1)
                continue
            for row in words[metric.name]:
                numbers += _histograms(row, metric.words) if metric.buckets else row
        return (self._template % tuple(numbers)).encode()

    def _lines(self, metric: Metric, model: str, info: Mapping[str, Labels]) -> Iterator[str]:
        yield f"# HELP {metric.full_name} {_escaped(metric.help)}".replace("%", "%%")
        yield f"# TYPE {metric.full_name} {metric.kind.value}"
        for labels in self._series(metric, model, info):
            yield from _of_series(metric, labels)

    def _series(self, metric: Metric, model: str, info: Mapping[str, Labels]) -> Iterator[Labels]:
        """In the order of the numbers."""
        if metric.info:
            yield {label: info.get(metric.name, {}).get(label, "") for label in metric.labels}
            return
        common = {"model_name": model} if metric.model else {}
        workers = [{"worker": str(slot)} for slot in range(self._workers)] if metric.worker else [{}]
        for worker in workers:
            for values in metric.series:
                yield common | worker | dict(zip(metric.labels, values, strict=True))


def _of_series(metric: Metric, labels: Labels) -> Iterator[str]:
    if metric.kind is not Kind.HISTOGRAM:
        yield _line(metric.full_name, labels)
        return
    for bound in (*(f"{bound:g}" for bound in metric.buckets), "+Inf"):
        yield _line(f"{metric.full_name}_bucket", {**labels, "le": bound})
    yield _line(f"{metric.full_name}_sum", labels)
    yield _line(f"{metric.full_name}_count", labels)


def _line(name: str, labels: Labels) -> str:
    inside = ",".join(f'{label}="{_quoted(value)}"' for label, value in labels.items())
    return (f"{name}{{{inside}}}" if labels else name).replace("%", "%%") + " %.15g"  # 15 digits: 0.1 stays 0.1


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")


def _histograms(row: Sequence[float], size: int) -> list[float]:
    """A page's buckets, each by itself, and sums as cumulative buckets, sums and counts. size: words of a series."""
    found: list[float] = []
    for end in range(size - 1, len(row), size):
        found += accumulate(row[end - size + 1 : end])
        found += row[end], found[-1]
    return found
