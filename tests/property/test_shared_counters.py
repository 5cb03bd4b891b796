"""A reader of pages that others are writing: no number ever falls, none is torn, and at rest all are right."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial

from colibri_daemon.common.counters import LAYOUTS, Counters, read
from colibri_daemon.common.metrics import BY_NAME, Source
from colibri_daemon.common.pages import Book
from colibri_daemon.exporter.readings import Readings
from hypothesis import given, settings
from hypothesis import strategies as st

SLOTS, ROUNDS = 2, 400


def forked(work: Callable[[], None]) -> int:
    if not (pid := os.fork()):
        try:
            work()
        finally:
            os._exit(0)
    return pid


def write(book_page: memoryview, seed: int) -> None:
    """Steps of a worker whose durations are multiples of 1/64: sums are exact."""
    counters, rng = Counters(book_page, Source.WORKER), random.Random(seed)
    steps = counters.histogram("step_duration_seconds", kind="decode")
    for _ in range(ROUNDS):
        counters.add("worker_steps_total")
        counters.add("worker_rows_total", 1 << 40)  # a torn store would show in either half
        steps.observe(rng.randrange(1, 320) / 64)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1 << 32), lives=st.integers(1, 3))
def test_no_number_falls_while_writers_write_and_die(seed: int, lives: int) -> None:
    book = Book.make(8)
    kept = [book.take(Source.WORKER.value, slot) for slot in range(SLOTS)]
    for life in range(lives):
        pids = {forked(partial(write, page.counters, seed + slot + life)) for slot, page in enumerate(kept)}
        before = [[0.0] * LAYOUTS[Source.WORKER].size for _ in kept]
        while pids:
            now = [read(page.counters, Source.WORKER) or last for page, last in zip(kept, before, strict=True)]
            for new, old in zip(now, before, strict=True):
                assert all(a >= b for a, b in zip(new, old, strict=True))
                assert new[LAYOUTS[Source.WORKER].first["worker_rows_total"]] % (1 << 40) == 0
            before = now
            pids -= {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0]}
    rows = Readings(book).rows(SLOTS)
    assert rows["worker_steps_total"] == [[lives * ROUNDS]] * SLOTS
    decode = BY_NAME["step_duration_seconds"].series.index(("decode",))
    width = BY_NAME["step_duration_seconds"].words
    *buckets, total = rows["step_duration_seconds"][0][decode * width : (decode + 1) * width]
    assert sum(buckets) == lives * ROUNDS * SLOTS
    draws = [random.Random(seed + slot + life) for slot in range(SLOTS) for life in range(lives)]
    assert total == sum(rng.randrange(1, 320) / 64 for rng in draws for _ in range(ROUNDS))
