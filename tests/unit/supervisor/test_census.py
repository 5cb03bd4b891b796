"""The supervisor's own numbers, and which page a process gets."""

from __future__ import annotations

import itertools
import signal
from dataclasses import replace

import pytest
from colibri_daemon.common.counters import Counters, read
from colibri_daemon.common.exit_codes import Exit
from colibri_daemon.common.metrics import CAUSES, Source
from colibri_daemon.common.pages import Book, Field
from colibri_daemon.exporter.readings import Readings
from colibri_daemon.supervisor.census import Census
from colibri_daemon.supervisor.children import Worker
from colibri_daemon.supervisor.generation import Dispatcher
from colibri_daemon.supervisor.lifecycle import State
from colibri_daemon.supervisor.roles import Roles
from colibri_daemon.supervisor.spawn import Death


def a_worker(census: Census, slot: int = 0, generation: int = 1) -> Worker:
    return Worker(Roles().worker, census.page(Source.WORKER, slot), itertools.count(1), False, slot, generation)


def lived(worker: Worker, state: State) -> Worker:
    worker.life = replace(worker.life, state=state)
    return worker


@pytest.mark.parametrize(("code", "state", "reason"), [
    (-signal.SIGKILL, State.READY, "killed"), (-signal.SIGSEGV, State.READY, "fault"),
    (-signal.SIGABRT, State.HUNG, "hang"), (Exit.INTERNAL, State.READY, "exit"),
    (Exit.CANNOT_LOAD, State.LOADING, "boot"), (-signal.SIGKILL, State.LOADING, "boot"),
    (0, State.READY, ""), (-signal.SIGTERM, State.STOPPING, ""),
])  # fmt: skip
def test_a_death_is_counted_by_how_unless_it_was_asked_for(code: int, state: State, reason: str) -> None:
    book = Book.make(16)
    census = Census(book)
    a_worker(census, 0)
    census.died(lived(a_worker(census, 1), state), Death(code))
    counted = Readings(book).rows(2)["worker_restarts_total"]
    assert counted == [[0.0] * len(CAUSES), [float(cause == reason) for cause in CAUSES]]


def test_other_processes_are_counted_by_kind() -> None:
    book = Book.make(16)
    census = Census(book)
    dispatcher = Dispatcher(Roles().dispatcher, census.page(Source.DISPATCHER), itertools.count(1), False, "1")
    dispatcher.life = replace(dispatcher.life, state=State.READY)
    census.died(dispatcher, Death(-signal.SIGSEGV))
    dispatcher.replaced = True  # we have ended it
    census.died(dispatcher, Death(-signal.SIGKILL))
    assert Readings(book).rows(0)["child_restarts_total"] == [[1.0, 0.0, 0.0]]


def test_loading_is_timed() -> None:
    book = Book.make(16)
    census = Census(book)
    census.loaded(a_worker(census), 2.5)
    assert Readings(book).rows(0)["weights_load_seconds"] == [[2.5]]


def test_two_generations_have_their_own_pages_and_later_ones_take_them_over() -> None:
    census = Census(book := Book.make(16))
    old, new = a_worker(census), a_worker(census, generation=2)
    for worker, rows in ((old, 3), (new, 4)):
        counters = Counters(worker.page.counters, Source.WORKER)
        counters.add("worker_rows_total", rows)
        counters.set("kv_leases", rows)
        worker.page[Field.STEPS] = rows
    assert Readings(book).rows(1)["kv_leases"] == [[7.0]]
    census.gone(old)
    third = a_worker(census, generation=3)
    assert third.page.place == old.page.place
    assert third.page[Field.STEPS] == 0
    rows = Readings(book).rows(1)
    assert (rows["kv_leases"], rows["worker_rows_total"]) == ([[4.0]], [[7.0]])
    assert read(third.page.counters, Source.WORKER) is not None
