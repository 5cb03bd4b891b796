"""What the supervisor says about the service: a state message for the dispatcher, log lines, systemd's status."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colibri_protocol.limits import PROTOCOL_VERSION

from ..common import log, process
from ..common.pages import Field
from ..common.settings import Settings
from .children import Worker
from .fleet import Fleet
from .generation import Generation
from .health import View, WorkerView, report, stuck
from .lifecycle import ABORT_SECONDS, State
from .notify import Notifier

PUSH_SECONDS = 0.5
EXTEND_SECONDS = 30.0  # of silence after which systemd may count a start, a reload or a stop as failed
STOP_SECONDS = 15.0  # that a stop takes beyond drain_seconds
SAMPLE_SECONDS = 10.0  # between two looks at a process's memory …
SAMPLE_SHARE = 1000  # … and so many times what the last look took: the kernel walks every mapped page for it


def view_of(fleet: Fleet, settings: Settings, checked: tuple[int, int] | None, served: bool, *, draining: bool,
            failure: str) -> View:  # fmt: skip
    """What serves, or is to be the first to serve."""
    serving, dispatcher = fleet.serving, fleet.dispatcher
    workers, pool = (serving.workers, serving.pool) if serving else ([], None)
    return View(
        kvpool=pool.life.state if pool else State.DOWN,
        reserved=(pool.page[Field.LOADED], pool.page[Field.TO_LOAD]) if pool else (0, 0),
        dispatcher=dispatcher.life.state,
        workers=[WorkerView(w.slot, w.life.state, w.busy, w.stalled, w.life.restarts, w.pid, w.resident,
                            w.page[Field.LOADED], w.page[Field.TO_LOAD]) for w in workers],
        served=served,
        draining=draining,
        failure=failure,
        checked=checked,
        kvpool_stalled=pool.stalled if pool else 0.0,
        dispatcher_stalled=dispatcher.stalled,
        patience=settings.degraded_seconds,
        spoiled=serving.spoiled if serving else "",
    )  # fmt: skip


def about(fleet: Fleet) -> dict[str, str | int]:
    """What serves, for the labels of metrics; nothing until that is known."""
    if (serving := fleet.serving) is None:
        return {}
    facts, isa = serving.facts, (worker.told["isa"] for worker in serving.workers if "isa" in worker.told)
    return {"model": facts.name, "id": facts.id, "version": fleet.dispatcher.version, "isa": next(isa, ""),
            "protocol": PROTOCOL_VERSION, "slabs": serving.pool.memory.arena.slabs, "slab_tokens": facts.slab_tokens,
            "pinned": facts.pinned, "window": facts.window}  # fmt: skip


def _workers_ready(view: View) -> str:
    """Nothing while they are not to be started yet."""
    up = sum(worker.state is State.READY for worker in view.workers)
    return "" if view.checked or not view.workers else f", {up} of {len(view.workers)} workers ready"


class Publisher:
    """served: the service has been ready. due: when the next turn has something to say even if nothing happens."""

    def __init__(self, path: Path, notifier: Notifier) -> None:
        self._path, self._notifier = path, notifier
        self._log = log.get("supervisor")
        self._said: tuple[Any, ...] = ()
        self._sampled, self._sample_due = -1, 0.0
        self._watchdog_due = 0.0
        self._stuck = ""
        self.served = False
        self.due = 0.0

    def turn(self, now: float, view: View, serving: Generation | None, reloading: str) -> dict[str, Any] | None:
        """The body of a "state" message if one is due: after a change and every PUSH_SECONDS. reloading: what is said
        of a reload under way, beside what is to be said anyway."""
        body = report(view)
        body["reason"] = "; ".join(filter(None, (body["reason"], reloading)))
        if serving is not None and body["ready"] and not self.served:
            self.served = True
            self._announce(serving)
        changed = self._say(body)
        if changed and body["state"] == "draining" and serving is not None:
            self._extend(serving.settings.drain_seconds + STOP_SECONDS)
        self._feed_watchdog(now, view)
        if not changed and now < self.due:
            return None
        self.due = now + min(PUSH_SECONDS, self._notifier.watchdog_seconds / 4)
        if body["state"] == "starting" or reloading:
            self._extend(EXTEND_SECONDS)
        if "progress" in body:
            self._notifier.send(STATUS=f"{body['reason']}: {body['progress']:.0%}{_workers_ready(view)}")
        if serving is not None:
            self._sample(now, serving.workers)
        return body

    def _extend(self, seconds: float) -> None:
        """What goes on has at least so long. systemd counts it from now, and never shortens what it has."""
        self._notifier.send(EXTEND_TIMEOUT_USEC=round(seconds * 1e6))

    def _feed_watchdog(self, now: float, view: View) -> None:
        """At half the interval, while every kind of process makes progress. What hangs is ended by this supervisor
        first; systemd ends the service if that does not help, or the supervisor itself hangs."""
        if (found := stuck(view)) != self._stuck:
            self._stuck = found
            if found and self._notifier.watchdog_seconds < math.inf:
                self._log.warning("the watchdog is not fed", reason=f"no progress: {found}")
        if now >= self._watchdog_due and not found and self._notifier.watchdog_seconds < math.inf:
            self._watchdog_due = now + self._notifier.watchdog_seconds / 2
            self._notifier.send(WATCHDOG=1)

    def _say(self, body: dict[str, Any]) -> bool:
        """Logs a new state; whether anything changed that is no mere measurement."""
        said = (body["ready"], body["state"], body["reason"])
        if said != self._said[:3]:
            self._log.info("state", state=body["state"], ready=body["ready"], reason=body["reason"])
            self._notifier.send(STATUS=f"{body['state']}: {body['reason']}" if body["reason"] else body["state"])
        if body["state"] in ("draining", "failed") and self._said[1:2] != (body["state"],):
            self._notifier.send(STOPPING=1)
        said += tuple((worker["up"], worker["pid"]) for worker in body["workers"])
        changed, self._said = said != self._said, said
        return changed

    def _announce(self, serving: Generation) -> None:
        """The line an operator looks for."""
        self._notifier.send(READY=1)
        hang, watchdog = serving.settings.hang_seconds, self._notifier.watchdog_seconds
        if watchdog < 2 * (hang + ABORT_SECONDS):
            self._log.warning("systemd may end the service before a process that hangs is ended: raise WatchdogSec, or "
                              "lower hang_seconds", hang_seconds=hang, watchdog_seconds=watchdog)
        facts, workers = serving.facts, serving.workers
        told = next((worker.told for worker in workers if worker.told), {})
        self._log.info(
            "ready",
            model=facts.name,
            id=facts.id,
            quantization=facts.quantization,
            workers=len(workers),
            kv_bytes=serving.pool.memory.arena.size,
            socket=str(self._path),
            **{name: told[name] for name in ("threads", "chunk", "gentle_chunk", "stall_ms") if name in told},
            seconds=round(process.age(), 3),
        )

    def _sample(self, now: float, workers: Sequence[Worker]) -> None:
        """Measures the memory of one worker, the next one in turn; new ones do not wait."""
        fresh = [worker for worker in workers if worker.life.state is State.READY and not worker.resident]
        if not fresh and now < self._sample_due:
            return
        self._sampled = (self._sampled + 1) % len(workers)
        worker = fresh[0] if fresh else workers[self._sampled]
        begun = time.monotonic()
        worker.resident = process.resident_bytes(worker.pid) if worker.pid else 0
        took = time.monotonic() - begun
        self._sample_due = now + max(SAMPLE_SECONDS / len(workers), SAMPLE_SHARE * took)
