"""The imbalance of experts, and what is read from /proc."""

from __future__ import annotations

import os
import subprocess
import time

import pytest
from colibri_daemon.common import experts
from colibri_daemon.common.metrics import Source
from colibri_daemon.common.pages import Book
from colibri_daemon.exporter.experts import WINDOW_SECONDS, Imbalance, imbalance
from colibri_daemon.exporter.processes import Usage, descriptors, usage


@pytest.mark.parametrize(("counts", "width", "expected"), [
    ([], 0, (0.0, 0.0)),
    ([0, 0, 0, 0], 2, (0.0, 0.0)),
    ([5, 5, 5, 5], 2, (1.0, 1.0)),
    ([4, 0, 2, 2], 2, (2.0, 1.5)),
    ([4, 0, 0, 0], 2, (2.0, 2.0)),  # a layer without tokens says nothing
    ([7], 1, (1.0, 1.0)),  # a dense model
])
def test_imbalance(counts: list[int], width: int, expected: tuple[float, float]) -> None:
    assert imbalance(counts, width) == expected


def test_it_is_that_of_the_last_minute() -> None:
    book = Book.make(4)
    memory = experts.begin(book.take(Source.WORKER.value), "a", 1, 2)
    assert memory is not None
    counts, seen = memory.cast("Q"), Imbalance(book)
    counts[0] = 1000  # before anybody looked
    seen.sample(0.0, "a")
    assert (seen.worst, seen.mean) == (0.0, 0.0)
    counts[1] = 10
    seen.sample(5.0, "a")
    assert seen.worst == 2.0
    counts[0] += 10
    seen.sample(10.0, "a")
    assert seen.worst == 1.0
    seen.sample(10.0 + WINDOW_SECONDS + 1, "a")
    assert seen.worst == 0.0


def test_another_model_begins_anew() -> None:
    book = Book.make(4)
    page, seen = book.take(Source.WORKER.value), Imbalance(book)
    first = experts.begin(page, "a", 2, 2)
    assert first is not None
    first.cast("Q")[0] = 8
    seen.sample(0.0, "a")
    second = experts.begin(page, "b", 1, 2)
    assert second is not None
    seen.sample(5.0, "b")
    second.cast("Q")[1] = 8
    seen.sample(10.0, "b")
    assert seen.worst == 2.0
    seen.sample(15.0, "c")  # nobody has counted for it
    assert seen.worst == 0.0


def test_usage_of_a_process() -> None:
    used = usage(os.getpid())
    assert 0 < used.cpu < 1e6
    assert 1 << 20 < used.resident < used.virtual
    assert time.time() - 86400 < used.started <= time.time() + 1
    opened, most = descriptors(os.getpid())
    assert 3 <= opened <= most


def test_a_process_that_is_gone_uses_nothing() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert usage(gone.pid) == Usage()
    assert descriptors(gone.pid) == (0, 0)
