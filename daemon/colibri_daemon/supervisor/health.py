"""What the supervisor tells the dispatcher to tell clients: HealthReply's fields, from the children's states."""

from __future__ import annotations

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
    stalled: float  # seconds without progress while busy
    restarts: int
    pid: int
    resident: int
    loaded: int = 0
    to_load: int = 0


@dataclass(frozen=True)
class View:
    """The service. served: it has been ready before. checked: (done, all) bytes of a running verification; reserved:
    of KV memory."""

    kvpool: State
    dispatcher: State
    workers: Sequence[WorkerView]
    served: bool = False
    draining: bool = False
    failure: str = ""
    checked: tuple[int, int] | None = None
    reserved: tuple[int, int] = (0, 0)


def report(view: View) -> dict[str, Any]:
    """The body of a "state" message, by wire names."""
    up = sum(worker.state is State.READY for worker in view.workers)
    state, reason = _judge(view, up)
    progress = _progress(view) if state == "starting" else None
    body = {
        "live": True,
        "ready": state in ("ready", "degraded") and up > 0 and view.dispatcher is State.READY,
        "state": state,
        "reason": reason,
        "workers": [_worker(worker) for worker in view.workers],
    }
    return body if progress is None else body | {"progress": progress}


def _judge(view: View, up: int) -> tuple[str, str]:
    """State and reason."""
    if view.failure:
        return "failed", view.failure
    if view.draining:
        return "draining", "the daemon was asked to stop"
    if view.dispatcher is not State.READY:
        return "degraded" if view.served else "starting", "the dispatcher is not ready yet"
    if not view.served and (not up or any(_first_start(worker) for worker in view.workers)):
        return "starting", "the model is being verified" if view.checked else "the model is being loaded"
    if view.kvpool is not State.READY:
        return ("degraded", "the KV pool is starting again") if view.served else ("starting", "KV memory is reserved")
    if up < len(view.workers):
        return "degraded", f"{up} of {len(view.workers)} workers can work"
    return "ready", ""


def _first_start(worker: WorkerView) -> bool:
    return worker.state in (State.DOWN, State.LOADING) and not worker.restarts


def _progress(view: View) -> float | None:
    parts = [(worker.loaded, worker.to_load) for worker in view.workers] + [view.reserved]
    done, size = view.checked or map(sum, zip(*parts, strict=True))
    return min(1.0, done / size) if size else None


def _worker(worker: WorkerView) -> dict[str, Any]:
    return {
        "slot": worker.slot,
        "up": worker.state is State.READY,
        "busy": worker.busy,
        "progress_age_ms": round(1000 * worker.stalled, 1) if worker.busy else 0.0,
        "restarts": worker.restarts,
        "pid": worker.pid,
        "resident_bytes": worker.resident,
    }
