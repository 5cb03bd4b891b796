"""What stands in the pages: of each metric the words of all its series, added up over the processes that count it."""

from __future__ import annotations

from collections.abc import Iterator
from operator import add

from ..common.counters import LAYOUTS, read
from ..common.metrics import METRICS, Metric, Source
from ..common.pages import Book, Head

Words = list[float]
Rows = dict[str, list[Words]]  # by metric: one row, or one for each worker


class Readings:
    """One look at the pages of a book. A page is read number by number, so two numbers of it may be a moment apart."""

    def __init__(self, book: Book) -> None:
        self._pages: dict[Source, list[tuple[int, Words]]] = {source: [] for source in LAYOUTS}
        for page in book.pages():
            source = Source(page.head[Head.SOURCE])
            if source in self._pages and (words := read(page.counters, source)) is not None:
                self._pages[source].append((page.head[Head.SLOT], words))

    def rows(self, workers: int) -> Rows:
        """Of slots from ``workers`` on only what counts for all of them is left."""
        found: Rows = {}
        for source, layout in LAYOUTS.items():
            whole = self._sum(source, None)
            slots = [self._sum(source, slot) for slot in range(workers)] if source in _BY_WORKER else []
            for metric in layout.metrics:
                first = layout.first[metric.name]
                end = first + metric.words * len(metric.series)
                rows = [words[first:end] for words in (slots if metric.worker else [whole])]
                found[metric.name] = rows if metric.combine == "sum" else [self._largest(metric, first, end)]
        return found

    def _of(self, source: Source, slot: int | None) -> Iterator[Words]:
        return (words for its_slot, words in self._pages[source] if slot in (None, its_slot))

    def _sum(self, source: Source, slot: int | None) -> Words:
        pages = self._of(source, slot)
        total = next(pages, None) or [0.0] * LAYOUTS[source].size
        for words in pages:
            total = list(map(add, total, words))
        return total

    def _largest(self, metric: Metric, first: int, end: int) -> Words:
        pages = [words[first:end] for words in self._of(metric.source, None)]
        return [max(column) for column in zip(*pages, strict=True)] or [0.0] * (end - first)


_BY_WORKER = {metric.source for metric in METRICS if metric.worker}
