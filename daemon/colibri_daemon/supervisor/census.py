"""The supervisor's own numbers for metrics: deaths by worker slot and by kind of process, and how long loading took.
And whose page is whose: each process that can live beside others of its kind has one of its own (common/pages.py)."""

from __future__ import annotations

from ..common.counters import Counters
from ..common.metrics import Source
from ..common.pages import Book, Page
from .children import Child, Worker
from .deaths import cause
from .lifecycle import State
from .spawn import Death


class Census:
    def __init__(self, book: Book) -> None:
        self._book = book
        self._own = Counters(book.take(Source.SUPERVISOR.value).counters, Source.SUPERVISOR)
        self._slots: dict[int, Counters] = {}

    def page(self, source: Source, slot: int = 0) -> Page:
        """For a new child; OSError if there are too many."""
        if source is Source.WORKER and slot not in self._slots:
            self._slots[slot] = Counters(self._book.take(Source.SLOT.value, slot).counters, Source.SLOT)
        return self._book.take(source.value, slot)

    def gone(self, child: Child) -> None:
        """It will never have a process again."""
        self._book.give_back(child.page)

    def loaded(self, worker: Worker, seconds: float) -> None:
        """It has just become ready."""
        self._own.set("weights_load_seconds", seconds)

    def died(self, child: Child, death: Death) -> None:
        """Before its life is told. Counted is what nobody asked for."""
        how = cause(death.code, child.life.state)
        if how == "stopped" or child.replaced:
            return
        if isinstance(child, Worker):
            reason = "boot" if child.life.state is State.LOADING else how
            self._slots[child.slot].add("worker_restarts_total", reason=reason)
        else:
            self._own.add("child_restarts_total", process=child.role.title)
