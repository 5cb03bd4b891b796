"""Numbers in shared pages: what is written is read, outlives its writer, and begins anew with another declaration."""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import replace

import pytest
from colibri_daemon.common import counters as module
from colibri_daemon.common import experts
from colibri_daemon.common.counters import LAYOUTS, Counters, read
from colibri_daemon.common.metrics import BY_NAME, Source
from colibri_daemon.common.pages import COUNTERS_BYTES, ENTRY, EXPERTS_BYTES, Book, Field, Head, Page, make_pages
from hypothesis import given
from hypothesis import strategies as st

WORKER = Source.WORKER.value


def words(page: Page, source: Source, name: str, *values: str) -> list[float]:
    found = read(page.counters, source)
    assert found is not None
    first = LAYOUTS[source].places[(name, *values)]
    return found[first : first + BY_NAME[name].words]


def test_what_is_written_is_read() -> None:
    (page,) = make_pages(1)
    assert read(page.counters, Source.DISPATCHER) is None
    counters = Counters(page.counters, Source.DISPATCHER)
    counters.add("request_success_total", finished_reason="abort")
    counters.add("request_success_total", 2, finished_reason="abort")
    counters.set("num_requests_running", 7)
    counters.set("num_requests_running", 4)
    assert words(page, Source.DISPATCHER, "request_success_total", "abort") == [3]
    assert words(page, Source.DISPATCHER, "num_requests_running") == [4]
    assert counters.get("request_success_total", finished_reason="abort") == 3
    assert sum(read(page.counters, Source.DISPATCHER) or []) == 7


@pytest.mark.parametrize(("name", "labels"), [("no_such_total", {}), ("num_requests_running", {"state": "x"}),
                                              ("request_success_total", {}), ("kv_leases", {})])
def test_only_what_is_declared(name: str, labels: dict[str, str]) -> None:
    with pytest.raises(KeyError):
        Counters.private(Source.DISPATCHER).add(name, **labels)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 5)), max_size=20))
def test_a_histogram_counts_each_value_in_one_bucket(values: list[tuple[float, int]]) -> None:
    (page,) = make_pages(1)
    counters = Counters(page.counters, Source.WORKER)
    mixed = counters.histogram("step_duration_seconds", kind="mixed")
    bounds = BY_NAME["step_duration_seconds"].buckets
    expected = [0.0] * (len(bounds) + 2)
    for value, times in values:
        mixed.observe(value, times)
        expected[bisect_left(bounds, value)] += times  # a bound belongs to the bucket below it
        expected[-1] += value * times
    assert words(page, Source.WORKER, "step_duration_seconds", "mixed") == expected
    assert words(page, Source.WORKER, "step_duration_seconds", "decode") == [0.0] * len(expected)


def test_counters_outlive_the_process() -> None:
    page = Book.make(4).take(WORKER)
    for _ in range(3):
        if not (pid := os.fork()):
            counters = Counters(page.counters, Source.WORKER)
            counters.add("worker_steps_total")
            counters.set("kv_leases", 9)
            os.kill(os.getpid(), 9)
        os.waitpid(pid, 0)
        page.clear_gauges()
    assert words(page, Source.WORKER, "worker_steps_total") == [3]
    assert words(page, Source.WORKER, "kv_leases") == [0]


def test_another_declaration_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    (page,) = make_pages(1)
    Counters(page.counters, Source.WORKER).add("worker_steps_total", 5)
    other = module.Layout(Source.WORKER)
    other.__dict__["metrics"] = tuple(replace(metric, name=f"new_{metric.name}") for metric in other.metrics)
    monkeypatch.setitem(module.LAYOUTS, Source.WORKER, other)
    assert read(page.counters, Source.WORKER) is None
    counters = Counters(page.counters, Source.WORKER)
    assert sum(read(page.counters, Source.WORKER) or [1]) == 0
    counters.add("new_worker_steps_total")
    monkeypatch.undo()
    assert read(page.counters, Source.WORKER) is None


def test_numbers_by_the_names_of_stats() -> None:
    counters = Counters.private(Source.KVPOOL)
    counters.add("kv_evictions_total", 2, reason="lru")
    counters.add("prefix_cache_hits_total", 3)
    numbers = counters.numbers()
    assert (numbers['kv_evictions_total{reason="lru"}'], numbers["prefix_cache_hits_total"]) == (2, 3)
    assert numbers['kv_slabs{state="live"}'] == 0
    assert not [name for name in numbers if "duration" in name]


# ---- the book --------------------------------------------------------------------------------------------------------


def test_a_page_is_taken_again_by_the_same_slot_alone() -> None:
    book = Book.make(8)
    first, second, other = book.take(WORKER, 0), book.take(WORKER, 0), book.take(WORKER, 1)
    assert len({page.place for page in (first, second, other)}) == 3
    Counters(first.counters, Source.WORKER).add("worker_steps_total")
    first[Field.STEPS] = 5
    book.give_back(first)
    again, pool = book.take(WORKER, 0), book.take(Source.KVPOOL.value)
    assert again.place == first.place
    assert again[Field.STEPS] == 0
    assert words(again, Source.WORKER, "worker_steps_total") == [1]
    assert pool.place not in (first.place, second.place, other.place)
    assert len(book.pages()) == 4


def test_a_full_book_says_so() -> None:
    book = Book.make(2)
    book.take(WORKER, 0)
    book.take(WORKER, 1)
    with pytest.raises(OSError, match="all 2 pages"):
        book.take(WORKER, 2)
    assert len(book.pages()) == 2


def test_another_process_sees_the_pages_that_are_taken_later() -> None:
    book = Book.make(4)
    seen = Book(book.fd, 4)
    assert seen.pages() == []
    page = book.take(WORKER, 3)
    Counters(page.counters, Source.WORKER).add("worker_rows_total", 8)
    (found,) = seen.pages()
    assert (found.head[Head.SOURCE], found.head[Head.SLOT]) == (WORKER, 3)
    assert words(found, Source.WORKER, "worker_rows_total") == [8]


def test_memory_that_nobody_uses_takes_no_room() -> None:
    book = Book.make()
    page = book.take(WORKER)
    Counters(page.counters, Source.WORKER)
    book.pages()
    assert os.fstat(book.fd).st_blocks * 512 < 2 * ENTRY
    assert len(page.counters) == COUNTERS_BYTES
    assert len(page.experts) == EXPERTS_BYTES


# ---- experts ---------------------------------------------------------------------------------------------------------


def test_tokens_of_experts_add_up_over_workers_of_one_model() -> None:
    book = Book.make(8)
    for slot, model in enumerate(("a", "b", "a")):
        memory = experts.begin(book.take(WORKER, slot), model, 2, 3)
        assert memory is not None
        memory.cast("Q")[:] = memoryview(bytes(8 * 6)).cast("Q")
        memory.cast("Q")[slot] = 10 + slot
    assert experts.tokens(book, "a") == (3, [10, 0, 12, 0, 0, 0])
    assert experts.tokens(book, "b") == (3, [0, 11, 0, 0, 0, 0])
    assert experts.tokens(book, "c") == (0, [])


def test_tokens_of_experts_outlive_the_process_but_not_the_model() -> None:
    book = Book.make(2)
    page = book.take(WORKER)
    for model, expected in (("a", 0), ("a", 1), ("b", 0), ("a", 0)):
        memory = experts.begin(page, model, 1, 2)
        assert memory is not None
        counts = memory.cast("Q")
        assert counts[1] == expected
        counts[1] += 1


@pytest.mark.parametrize(("layers", "count"), [(0, 8), (61, 512), (1 << 40, 1)])
def test_what_has_no_room_is_not_counted(layers: int, count: int) -> None:
    assert experts.begin(make_pages(1)[0], "a", layers, count) is None


def test_the_largest_models_have_room() -> None:
    assert experts.begin(make_pages(1)[0], "DeepSeek-V3", 61, 256) is not None
