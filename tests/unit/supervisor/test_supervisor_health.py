"""From the children's states to what clients are told."""

from __future__ import annotations

import itertools

import pytest
from colibri_daemon.supervisor.health import View, WorkerView, report, stuck
from colibri_daemon.supervisor.lifecycle import RUNNING, State
from colibri_protocol.messages import HealthReply


def worker(slot: int, state: State, **fields) -> WorkerView:
    values = {"busy": False, "stalled": 0.0, "restarts": 0, "pid": 10 if state in RUNNING else 0, "resident": 0}
    return WorkerView(slot, state, **(values | fields))


def view(*states: State, dispatcher: State = State.READY, kvpool: State = State.READY, late=(), **fields) -> View:
    """late: slots that show no progress."""
    workers = [worker(slot, state, stalled=2.0 * (slot in late)) for slot, state in enumerate(states)]
    return View(kvpool, dispatcher, workers, patience=2.0, **fields)


@pytest.mark.parametrize(
    ("seen", "state", "ready"),
    [
        (view(State.DOWN, dispatcher=State.DOWN), "starting", False),
        (view(State.READY, dispatcher=State.LOADING), "starting", False),
        (view(State.LOADING, State.LOADING), "starting", False),
        (view(State.READY, State.LOADING), "starting", False),  # full service, or a failed start, comes soon
        (view(State.READY, State.BACKOFF), "degraded", True),
        (view(State.READY, State.READY), "ready", True),
        (view(State.READY, State.LOADING, served=True), "degraded", True),
        (view(State.HUNG, State.BACKOFF, served=True), "degraded", False),
        (view(State.READY, dispatcher=State.LOADING, served=True), "degraded", False),
        (view(State.READY, kvpool=State.LOADING), "starting", False),
        (view(State.READY, kvpool=State.LOADING, served=True), "degraded", True),
        (view(State.READY, State.READY, late=[1]), "degraded", True),
        (view(State.READY, State.READY, late=[0, 1], served=True), "degraded", False),
        (view(State.READY, State.READY, late=[0], served=True), "degraded", True),
        (view(State.READY, State.BACKOFF, late=[0], served=True), "degraded", False),
        (view(State.READY, State.LOADING, late=[0, 1]), "starting", False),  # loading has a limit of its own
        (view(State.READY, kvpool_stalled=2.0), "degraded", True),
        (view(State.READY, dispatcher_stalled=2.0), "degraded", False),
        (view(State.READY, spoiled="dense.bin"), "degraded", False),
        (view(State.READY, spoiled="dense.bin", draining=True), "draining", False),
        (view(State.READY, draining=True), "draining", False),
        (view(State.READY, draining=True, failure="why"), "failed", False),
    ],
)
def test_states(seen, state, ready):
    body = report(seen)
    assert (body["state"], body["ready"]) == (state, ready)
    assert bool(body["reason"]) == (state != "ready")


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        (view(State.READY, State.READY), ""),
        (view(), ""),  # nothing is known of the model yet
        (view(State.LOADING, dispatcher=State.BACKOFF, kvpool=State.DOWN), ""),  # being started
        (view(State.READY, State.READY, late=[1]), ""),  # the other one works
        (view(State.READY, State.READY, late=[0, 1]), "the workers"),
        (view(State.READY, State.BACKOFF, late=[0]), ""),
        (view(State.HUNG, State.READY, late=[1]), "the workers"),
        (view(State.FAILED, State.FAILED, spoiled="dense.bin"), ""),  # waits for an operator
        (view(State.READY, dispatcher_stalled=2.0), "the dispatcher"),
        (view(State.READY, dispatcher_stalled=1.9), ""),
        (view(State.READY, dispatcher=State.HUNG), "the dispatcher"),
        (view(State.READY, kvpool_stalled=2.0), "the KV pool"),
    ],
)
def test_who_starves_the_watchdog(seen, kind):
    assert stuck(seen) == kind


def test_only_the_ready_have_no_reason():
    for states in itertools.product(State, repeat=2):
        for served, draining in itertools.product((False, True), repeat=2):
            body = report(view(*states, served=served, draining=draining))
            assert body["ready"] <= (body["state"] in ("ready", "degraded"))
            assert bool(body["reason"]) == (body["state"] != "ready")


def test_who_is_late_is_named():
    late = view(State.READY, State.LOADING, State.READY, late=[0, 1], served=True, kvpool_stalled=60.0)
    body = report(late)
    assert body["reason"] == "no progress: the KV pool, worker 0 (pid 10)"
    assert [worker["up"] for worker in body["workers"]] == [False, False, True]
    assert "late" not in report(view(State.READY, dispatcher_stalled=1.9))["reason"]


def test_spoiled_weights_are_a_reason_to_refuse():
    assert report(view(State.READY, spoiled="dense.bin has changed"))["refuse"] == "dense.bin has changed"
    assert "refuse" not in report(view(State.READY, State.BACKOFF))


def test_progress_of_loading_and_of_verifying():
    loading = [worker(0, State.LOADING, loaded=25, to_load=100), worker(1, State.LOADING, loaded=75, to_load=100)]
    assert report(View(State.READY, State.READY, loading))["progress"] == 0.5
    assert report(View(State.READY, State.READY, loading, checked=(30, 40)))["progress"] == 0.75
    half = report(View(State.LOADING, State.READY, loading, reserved=(0, loading[0].to_load * len(loading))))
    assert half["progress"] == 0.25
    assert "progress" not in report(View(State.READY, State.READY, [worker(0, State.DOWN)]))
    assert "progress" not in report(View(State.READY, State.READY, [worker(0, State.READY, loaded=100, to_load=100)]))


def test_a_worker():
    busy = worker(3, State.READY, busy=True, stalled=1.25, restarts=2, pid=77, resident=4096)
    assert report(View(State.READY, State.READY, [busy]))["workers"] == [
        {"slot": 3, "up": True, "busy": True, "progress_age_ms": 1250.0, "restarts": 2, "pid": 77,
         "resident_bytes": 4096}
    ]  # fmt: skip


@pytest.mark.parametrize("state", State)
def test_the_protocol_takes_it(state):
    """Every field, and no other."""
    body = report(View(State.READY, State.READY, [worker(0, state, busy=True, stalled=0.5, loaded=1, to_load=2)]))
    reply = HealthReply.from_body(body)
    assert body.keys() <= HealthReply.__dataclass_fields__.keys()
    assert body["workers"][0].keys() == reply.workers[0].__dataclass_fields__.keys()
    assert (reply.state, reply.workers[0].progress_age_ms) == (body["state"], 500.0)
