"""What the supervisor tells the dispatcher to tell clients: HealthReply's fields, from the children's states.

A dispatcher that is stopped cannot tell it: then nobody answers until it goes on or, after hang_seconds, is replaced.
The log and systemd's status say so meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .lifecycle import State


@dataclass(frozen=True)
class WorkerView:
    """One slot, as of now. loaded, to_load: bytes of weights."""

    slot: int
    state: State
    busy: bool
    stalled: float  # seconds without progress
    restarts: int
    pid: int
    resident: int
    loaded: int = 0
    to_load: int = 0


@dataclass(frozen=True)
class View:
    """The service. served: it has been ready before. checked: (done, all) bytes of a running verification; reserved:
    of KV memory. patience: seconds without progress after which a process counts as late. spoiled: why the weights
    cannot be trusted any more."""

    kvpool: State
    dispatcher: State
    workers: Sequence[WorkerView]
    served: bool = False
    draining: bool = False
    failure: str = ""
    checked: tuple[int, int] | None = None
    reserved: tuple[int, int] = (0, 0)
    kvpool_stalled: float = 0.0
    dispatcher_stalled: float = 0.0
    patience: float = math.inf
    spoiled: str = ""


def report(view: View) -> dict[str, Any]:
    """The body of a "state" message, by wire names. "refuse" is beyond the protocol: why new requests are refused, if
    it is not the state that says so."""
    workers = [_worker(worker, _is_late(view, worker.state, worker.stalled)) for worker in view.workers]
    up = sum(worker["up"] for worker in workers)
    state, reason = _judge(view, up)
    body = {
        "live": True,
        "ready": state in ("ready", "degraded") and up > 0 and _serves(view) and not view.spoiled,
        "state": state,
        "reason": reason,
        "workers": workers,
    }
    progress = _progress(view) if state == "starting" else None
    extra = {"progress": progress, "refuse": view.spoiled or None}
    return body | {name: value for name, value in extra.items() if value is not None}


def stuck(view: View) -> str:
    """The first kind of process of which none that runs makes progress; nothing if there is none. What is being started
    again is the lifecycle's affair, which gives it up in time."""
    kinds = {
        "the dispatcher": [(view.dispatcher, view.dispatcher_stalled)],
        "the KV pool": [(view.kvpool, view.kvpool_stalled)],
        "the workers": [(worker.state, worker.stalled) for worker in view.workers],
    }
    for kind, lives in kinds.items():
        if lives and all(_is_stuck(view, *life) for life in lives):
            return kind
    return ""


def _is_stuck(view: View, state: State, stalled: float) -> bool:
    return state is State.HUNG or _is_late(view, state, stalled)


def _is_late(view: View, state: State, stalled: float) -> bool:
    """It serves, but shows no progress: stopped, stuck, or the machine is overloaded."""
    return state is State.READY and stalled >= view.patience


def _serves(view: View) -> bool:
    return view.dispatcher is State.READY and not _is_late(view, view.dispatcher, view.dispatcher_stalled)


def _late(view: View) -> list[str]:
    """The names of those that are late."""
    seen = [("the dispatcher", 0, view.dispatcher, view.dispatcher_stalled),
            ("the KV pool", 0, view.kvpool, view.kvpool_stalled),
            *((f"worker {worker.slot}", worker.pid, worker.state, worker.stalled) for worker in view.workers)]
    return [f"{name} (pid {pid})" if pid else name for name, pid, *life in seen if _is_late(view, *life)]


def _judge(view: View, up: int) -> tuple[str, str]:
    """State and reason."""
    if view.failure:
        return "failed", view.failure
    if view.draining:
        return "draining", "the daemon was asked to stop"
    if view.spoiled:
        return "degraded", view.spoiled
    if view.dispatcher is not State.READY:
        return "degraded" if view.served else "starting", "the dispatcher is not ready yet"
    if not view.served and (not up or any(_first_start(worker) for worker in view.workers)):
        return "starting", "the model is being verified" if view.checked else "the model is being loaded"
    if view.kvpool is not State.READY:
        return ("degraded", "the KV pool is starting again") if view.served else ("starting", "KV memory is reserved")
    if late := _late(view):
        return "degraded", f"no progress: {', '.join(late)}"
    if up < len(view.workers):
        return "degraded", f"{up} of {len(view.workers)} workers can work"
    return "ready", ""


def _first_start(worker: WorkerView) -> bool:
    return worker.state in (State.DOWN, State.LOADING) and not worker.restarts


def _progress(view: View) -> float | None:
    parts = [(worker.loaded, worker.to_load) for worker in view.workers] + [view.reserved]
    done, size = view.checked or map(sum, zip(*parts, strict=True))
    return min(1.0, done / size) if size else None


def _worker(worker: WorkerView, late: bool) -> dict[str, Any]:
    return {
        "slot": worker.slot,
        "up": worker.state is State.READY and not late,
        "busy": worker.busy,
        "progress_age_ms": round(1000 * worker.stalled, 1),
        "restarts": worker.restarts,
        "pid": worker.pid,
        "resident_bytes": worker.resident,
    }
