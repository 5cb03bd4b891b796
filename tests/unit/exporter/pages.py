"""Pages as the daemon's processes would have written them, and what the supervisor would say beside them."""

from __future__ import annotations

import os
import time
from typing import Any

from colibri_daemon.common.counters import LAYOUTS, Counters
from colibri_daemon.common.metrics import Source
from colibri_daemon.common.pages import COUNTERS_HEADER, Book, Page
from colibri_daemon.exporter.experts import Imbalance
from colibri_daemon.exporter.scrape import Scrape, Service


def filled(book: Book, source: Source, slot: int = 0, scale: float = 1.0) -> Page:
    """Word i is scale * (i + 1): every number of the page is another one."""
    page = book.take(source.value, slot)
    Counters(page.counters, source)
    size = LAYOUTS[source].size
    written = page.counters[COUNTERS_HEADER : COUNTERS_HEADER + 8 * size].cast("d")
    for i in range(size):
        written[i] = scale * (i + 1)
    return page


def whole(workers: int = 2) -> Book:
    book = Book.make(64)
    for source in (Source.DISPATCHER, Source.KVPOOL, Source.SUPERVISOR):
        filled(book, source)
    for slot in range(workers):
        filled(book, Source.WORKER, slot, 10.0 ** slot)
        filled(book, Source.SLOT, slot, 10.0 ** slot)
    return book


def said(workers: int = 2, **changes: Any) -> dict[str, Any]:
    """A "state" message."""
    return {
        "t": "state", "live": True, "ready": True, "state": "ready", "reason": "",
        "workers": [{"slot": slot, "up": True, "busy": False, "progress_age_ms": 100.0, "restarts": 0,
                     "pid": os.getpid(), "resident_bytes": 1} for slot in range(workers)],
        "reloaded": {"ok": True, "good": 1700000000.0},
        "about": {"model": 'tiny "m" 100%', "id": "abc", "version": "1.2.3", "isa": "avx2", "protocol": "1",
                  "slabs": 99, "slab_tokens": 64, "pinned": 4, "window": 2048},
    } | changes  # fmt: skip


def scrape(book: Book, message: dict[str, Any] | None) -> Scrape:
    service = Service(time.monotonic)
    if message is not None:
        service.update(message)
    return Scrape(book, service, Imbalance(book), os.getpid())
