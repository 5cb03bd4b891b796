"""Numbers of a process in its page of shared memory (pages.py), which the metrics process reads at any moment.

Each page has one writer. A number is a 64-bit float, exact for counts up to 2^53, and written by one aligned store: a
reader sees the old or the new one. They outlive the process: whoever has the page next goes on counting, so counters
never fall and no series comes or goes when a process does. Gauges are cleared by the supervisor when it is reaped.

    counters = Counters(page.counters, Source.WORKER)
    counters.add("kv_evictions_total", 3, reason="lru")
    steps = counters.histogram("step_duration_seconds", kind="decode")
    steps.observe(0.012)
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from .metrics import METRICS, Kind, Metric, Source
from .pages import COUNTERS_BYTES, COUNTERS_HEADER, Head


@dataclass(frozen=True)
class Layout:
    """Where the numbers of a source stand in its page, counted in words: gauges first, so that they can be cleared."""

    source: Source

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        return tuple(sorted((metric for metric in METRICS if metric.source is self.source),
                            key=lambda metric: metric.kind is not Kind.GAUGE))

    @cached_property
    def first(self) -> dict[str, int]:
        """Of each metric."""
        found, at = {}, 0
        for metric in self.metrics:
            found[metric.name], at = at, at + metric.words * len(metric.series)
        return found

    @cached_property
    def places(self) -> dict[tuple[str, ...], int]:
        """(name, label value …) → the first word of the series."""
        return {(metric.name, *values): self.first[metric.name] + index * metric.words
                for metric in self.metrics for index, values in enumerate(metric.series)}

    @cached_property
    def gauges(self) -> int:
        """Words of gauges."""
        return sum(len(metric.series) for metric in self.metrics if metric.kind is Kind.GAUGE)

    @cached_property
    def size(self) -> int:
        return sum(metric.words * len(metric.series) for metric in self.metrics)

    @cached_property
    def digest(self) -> int:
        """Tells pages of one declaration from those of another version's. Never 0."""
        shape = [(metric.name, metric.kind.value, metric.series, metric.buckets) for metric in self.metrics]
        return zlib.crc32(repr(shape).encode()) | 1 << 32

    @cached_property
    def keys(self) -> dict[str, int]:
        """By key(), without histograms: the word of each series."""
        return {key: self.first[metric.name] + index for metric in self.metrics if metric.kind is not Kind.HISTOGRAM
                for index, key in enumerate(metric.keys())}


LAYOUTS: dict[Source, Layout] = {source: Layout(source) for source in Source if source is not Source.METRICS}


class Histogram:
    """One series. Cheap enough for every token: a search among the bounds and two stores."""

    __slots__ = ("_bounds", "_first", "_sum", "_words")

    def __init__(self, words: memoryview[float], first: int, bounds: tuple[float, ...]) -> None:
        self._words, self._first, self._bounds = words, first, bounds
        self._sum = first + len(bounds) + 1

    def observe(self, value: float, times: int = 1) -> None:
        words = self._words
        words[self._first + bisect_left(self._bounds, value)] += times
        words[self._sum] += value * times


class Total:
    """One series of a counter, for those who count often."""

    __slots__ = ("_place", "_words")

    def __init__(self, words: memoryview[float], place: int) -> None:
        self._words, self._place = words, place

    def add(self, amount: float) -> None:
        self._words[self._place] += amount


class Counters:
    """The numbers of one source, from its declaration. KeyError for what that does not have."""

    def __init__(self, memory: memoryview, source: Source) -> None:
        """memory: COUNTERS_BYTES, of which this process is the only writer. What is there of the same declaration goes
        on; what another version of the package has left begins anew."""
        self._layout = LAYOUTS[source]
        self.metrics = self._layout.metrics
        self._words, head = memory[COUNTERS_HEADER:].cast("d"), memory[:COUNTERS_HEADER].cast("Q")
        if head[Head.DIGEST] != self._layout.digest:
            head[Head.DIGEST] = 0  # it cannot be read meanwhile
            memory[COUNTERS_HEADER:] = bytes(len(memory) - COUNTERS_HEADER)
            head[Head.GAUGES], head[Head.DIGEST] = self._layout.gauges, self._layout.digest
        self._places = self._layout.places

    @classmethod
    def private(cls, source: Source) -> Counters:
        """That nobody else sees."""
        return cls(memoryview(bytearray(COUNTERS_BYTES)), source)

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        self._words[self._places[(name, *labels.values())]] += amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Of a gauge; or of a counter that is counted elsewhere."""
        self._words[self._places[(name, *labels.values())]] = value

    def get(self, name: str, **labels: str) -> float:
        value: float = self._words[self._places[(name, *labels.values())]]
        return value

    def observe(self, name: str, value: float, **labels: str) -> None:
        self.histogram(name, **labels).observe(value)

    def total(self, name: str, **labels: str) -> Total:
        return Total(self._words, self._places[(name, *labels.values())])

    def histogram(self, name: str, **labels: str) -> Histogram:
        """For those who observe often."""
        bounds = next(metric.buckets for metric in self._layout.metrics if metric.name == name)
        return Histogram(self._words, self._places[(name, *labels.values())], bounds)

    def numbers(self) -> dict[str, float]:
        """All but histograms, by key()."""
        return {key: self._words[at] for key, at in self._layout.keys.items()}


def read(memory: memoryview, source: Source) -> list[float] | None:
    """All words in the order of the layout; None if another version of the package has written them, or nobody."""
    layout = LAYOUTS[source]
    if memory[:COUNTERS_HEADER].cast("Q")[Head.DIGEST] != layout.digest:
        return None
    end = COUNTERS_HEADER + 8 * layout.size
    words: memoryview[float] = memory[COUNTERS_HEADER:end].cast("d")
    return words.tolist()  # type: ignore[return-value]  # of floats, whatever typeshed says
