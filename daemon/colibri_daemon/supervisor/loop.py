"""The supervisor: one thread, one loop, in a fixed order: signals, messages and deaths, liveness, top up, publish.

It never computes, never waits for a child or a client, and writes no shared memory but the page of a slot that has no
process. What happens to a child is decided by lifecycle.py, what clients are told by health.py.
"""

from __future__ import annotations

import math
import select
import signal
import time
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

from ..common import ipc, log
from ..common.arena import Arena
from ..common.exit_codes import Exit
from ..common.facts import ModelFacts
from ..common.pages import Field, make_pages
from ..common.settings import Settings
from . import health
from .children import Child, Steady, Worker
from .kv_memory import KvMemory
from .lifecycle import (
    NEVER,
    Event,
    Exited,
    GiveUp,
    Hung,
    Kill,
    Ready,
    RestartCap,
    Signal,
    Spawn,
    Spawned,
    State,
    Stop,
    Tick,
    advance,
)
from .links import Links
from .notify import Notifier
from .publish import Publisher
from .roles import Roles
from .signals import Recorder
from .sockets import Listener
from .tasks import ModelError, Preflight

DISPATCHER_PAGE, POOL_PAGE, FIRST_WORKER_PAGE = 0, 1, 2  # the last one is the tasks'
DRAIN_GRACE = 1.0  # seconds the dispatcher gets beyond drain_seconds to say "drained"
KILL_SECONDS = 5.0  # a process that SIGKILL has not ended by then is stuck in the kernel; we leave without it


class Stage(IntEnum):
    """How far the end has come; each further signal is at least one stage."""

    SERVE = 0
    DRAIN = 1  # no new requests, live ones finish
    STOP = 2  # the dispatcher ends what is left, then the workers go, then the pool
    KILL = 3


class Supervisor:
    """The service from the model check to its end. run() returns its exit code."""

    def __init__(self, settings: Settings, listener: Listener, notifier: Notifier, roles: Roles) -> None:
        self._settings, self._listener = settings, listener
        self._log = log.get("supervisor")
        pages = make_pages(FIRST_WORKER_PAGE + settings.workers + 1)
        self._preflight = Preflight(settings, roles, pages[-1])
        self._kvpool = Steady(roles.kvpool, pages[POOL_PAGE])
        self._dispatcher = Steady(roles.dispatcher, pages[DISPATCHER_PAGE])
        self._workers = [Worker(roles.worker, pages[FIRST_WORKER_PAGE + i], i) for i in range(settings.workers)]
        self._children: list[Child] = [self._kvpool, self._dispatcher, *self._workers]  # in the order of their start
        self._links = Links(self._kvpool, self._dispatcher, self._workers)
        self._memory: KvMemory | None = None  # once the model is known
        self._cap = RestartCap()
        self._publisher = Publisher(settings, listener.path, notifier)
        self._stage, self._until = Stage.SERVE, NEVER
        self._code, self._failure = Exit.STOPPED, ""

    # ---- the loop ----

    def run(self, signals: Recorder) -> int:
        """signals: records HANDLERS."""
        self._preflight.begin(time.monotonic())
        while not self._over():
            woken = self._wait(signals.fd)
            for number in signals.taken():
                HANDLERS[number](self, number)
            self._hear_all(woken)
            self._reap(woken)
            self._judge()
            self._top_up()
            self._publish()
        if self._memory is not None:
            self._memory.close()
        self._log.info("stopped", exit=int(self._code), reason=self._failure or "asked to")
        return self._code

    def _wait(self, signals: int) -> set[int]:
        """The descriptors that have something to read, after at most _timeout(). A new poll object each time: there are
        few descriptors and few turns, and numbers that were closed and used again cannot confuse it."""
        poll = select.poll()
        for fd in (signals, *self._descriptors()):
            poll.register(fd, select.POLLIN)
        return {fd for fd, _ in poll.poll(math.ceil(1000 * self._timeout()))}

    def _descriptors(self) -> Iterator[int]:
        for child in self._children:
            if child.process is not None:
                yield child.process.pidfd
            if child.control is not None:
                yield child.control.fileno()
        if self._preflight.task is not None:
            yield self._preflight.task.process.pidfd

    def _over(self) -> bool:
        if self._stage < Stage.STOP:
            return False
        gone = self._preflight.task is None and not any(child.life.running for child in self._children)
        return gone or (self._stage is Stage.KILL and time.monotonic() >= self._until)

    def _timeout(self) -> float:
        times = [self._publisher.due, self._until]
        for child in self._children:
            wakes = child.life.wakes() if self._may_start(child) or child.life.running else NEVER
            times.append(max(wakes, self._cap.free_at()) if child.life.spawns and not child.life.running else wakes)
        return max(0.0, min(times) - time.monotonic())

    # ---- signals ----

    def _on_stop(self, number: signal.Signals) -> None:
        self._log.info("asked to stop", signal=number.name, again=self._stage > Stage.SERVE)
        self._go_to(Stage(min(self._stage + 1, Stage.KILL)))

    def _on_reload(self, number: signal.Signals) -> None:
        self._log.warning("reload is not available yet: nothing was changed, restart to use another configuration",
                          signal=number.name)

    # ---- messages and deaths ----

    def _hear_all(self, woken: set[int]) -> None:
        for child in self._children:
            if child.control is not None and child.control.fileno() in woken:
                self._hear(child)

    def _hear(self, child: Child) -> None:
        for message in child.received():
            self._handle(child, message)

    def _handle(self, child: Child, message: dict[str, Any]) -> None:
        match message:
            case {"t": "ready", **told}:
                child.told = told
                self._log.debug("ready", child=child.role.title, child_pid=child.pid, **told)
                self._feed(child, Ready(time.monotonic()))
            case {"t": "failed", "reason": reason}:
                child.reason = str(reason)
            case {"t": "drained"}:
                if self._stage is Stage.DRAIN:  # a dispatcher that was stopped by hand says it too
                    self._go_to(Stage.STOP)
            case {"t": "kill", "kind": kind, "slot": slot, "epoch": epoch, "reason": reason} if child is self._kvpool:
                self._kill_peer(self._workers[slot] if kind == "worker" else self._dispatcher, epoch, reason)
            case _:
                self._log.warning("unexpected message", child=child.role.title, type=str(message.get("t")))

    def _kill_peer(self, child: Child, epoch: int, reason: str) -> None:
        """The pool is at odds with it. What it has in the arena can be used again only when it is gone."""
        if self._stage < Stage.STOP and child.process is not None and child.epoch == epoch:
            self._log.error("the pool has a process ended", child=child.role.title, child_pid=child.pid, reason=reason)
            child.process.signal(signal.SIGKILL)

    def _reap(self, woken: set[int]) -> None:
        for child in self._children:
            if child.process is not None and child.process.pidfd in woken:
                self._bury(child)
        try:
            self._preflight.advance(time.monotonic())
        except ModelError as e:
            for error in e.errors if self._stage < Stage.STOP else ():
                self._log.error("the model cannot be used", error=error)
            self._fail(e.code, e.errors[0])

    def _bury(self, child: Child) -> None:
        self._hear(child)  # its last words say why
        pid, proven, death = child.pid, child.proven, child.reap()
        if death is None:
            return
        orderly = child.life.state is State.STOPPING or death.code == Exit.STOPPED
        write = self._log.info if orderly else self._log.error
        write("process ended", child=child.role.title, child_pid=pid, how=str(death),
              **{name: text for name, text in (("reason", child.reason), ("trace", death.trace)) if text})
        if isinstance(child, Worker):
            self._links.worker_dead(child, death)
        self._feed(child, Exited(time.monotonic(), death.code, proven))

    # ---- liveness ----

    def _judge(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.life.state in (State.LOADING, State.READY):
                bound = self._bound(child)
                if child.judge(now) >= bound:
                    self._log.error("no progress, the process is ended", child=child.role.title, child_pid=child.pid,
                                    seconds=round(child.stalled, 1), state=child.life.state.value)
                    self._feed(child, Hung(now))
        task = self._preflight.task
        if task is not None and task.stalled(now) >= self._settings.load_seconds:
            self._fail(Exit.CANNOT_LOAD, f"{task.role.title}: no progress for {self._settings.load_seconds:g} s")

    def _bound(self, child: Child) -> float:
        return self._settings.load_seconds if child.life.state is State.LOADING else self._settings.hang_seconds

    # ---- starting and ending children ----

    def _top_up(self) -> None:
        now = time.monotonic()
        self._wind_down(now)
        self._allot()
        for child in self._children:
            if child.life.running or self._may_start(child):
                self._feed(child, Tick(now))
            child.flush()

    def _allot(self) -> None:
        """Makes the memory of the KV cache as soon as its size can be known."""
        facts = self._preflight.facts
        if facts is None or self._memory is not None or self._stage >= Stage.STOP:
            return
        try:
            self._memory = KvMemory.make(self._settings, facts)
        except (OSError, ValueError) as e:
            self._fail(Exit.CANNOT_LOAD, str(e))

    def _may_start(self, child: Child) -> bool:
        known = self._preflight.passed if isinstance(child, Worker) else self._memory is not None
        return known and self._stage < Stage.STOP

    def _feed(self, child: Child, event: Event) -> None:
        child.life, actions = advance(child.life, event)
        for action in actions:
            match action:
                case Spawn():
                    self._start(child)
                case Signal(number) if child.process is not None:
                    child.process.signal(number)
                case GiveUp(code):
                    self._fail(code, child.reason or f"{child.role.title}: {GIVEN_UP[code]}")

    def _start(self, child: Child) -> None:
        now = time.monotonic()
        facts = self._preflight.facts
        assert facts is not None
        if child.life.spawns:
            if now < self._cap.free_at():
                return
            self._cap.take(now)
        try:
            self._launch(child, now, facts)
        except OSError as e:
            self._log.error("a process cannot be started", child=child.role.title, error=str(e))
            return self._feed(child, Exited(now, Exit.INTERNAL))
        self._feed(child, Spawned(now))
        self._log.debug("started", child=child.role.title, child_pid=child.pid)

    def _launch(self, child: Child, now: float, facts: ModelFacts) -> None:
        """Starts the process and gives it its links."""
        memory, settings = self._memory, self._settings
        assert memory is not None
        if child is self._kvpool:
            for worker in self._workers:
                self._hear(worker)  # who is ready may have slabs
            child.start(now, settings, facts, last=(memory.arena, memory.journal), fds=memory.fds)
            self._links.pool_started()
        elif child is self._dispatcher:
            child.start(now, settings, facts, first=(self._listener.sock,))
            self._links.dispatcher_started()
        elif isinstance(child, Worker):
            self._launch_worker(child, now, facts, memory.arena)

    def _launch_worker(self, worker: Worker, now: float, facts: ModelFacts, arena: Arena) -> None:
        theirs, ours = ipc.link()
        try:
            worker.start(now, self._settings, facts, first=(theirs,), last=(arena,), fds=(arena.fd,))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._links.worker_started(worker, ours)

    # ---- the end ----

    def _fail(self, code: Exit, reason: str) -> None:
        if self._failure or self._stage >= Stage.STOP:
            return
        self._code, self._failure = code, reason
        self._log.error("the service ends", exit=int(code), code=code.name, reason=reason)
        self._go_to(Stage.STOP)

    def _go_to(self, stage: Stage) -> None:
        """Stages only grow; a stage that has nothing to wait for is left by the next turn."""
        if stage <= self._stage:
            return
        now = time.monotonic()
        self._stage = stage
        self._until = {
            Stage.DRAIN: now + self._settings.drain_seconds + DRAIN_GRACE,
            Stage.KILL: now + KILL_SECONDS,
        }.get(stage, NEVER)
        if stage is Stage.DRAIN:
            self._dispatcher.tell({"t": "drain", "seconds": self._settings.drain_seconds})
        self._wind_down(now)

    def _wind_down(self, now: float) -> None:
        """What each stage asks for; safe to ask again. A dispatcher stops before the workers, so that it can end what
        is left in its own words."""
        if self._stage is Stage.DRAIN and (now >= self._until or self._dispatcher.life.state is not State.READY):
            return self._go_to(Stage.STOP)
        if self._stage < Stage.STOP:
            return
        event = Stop(now) if self._stage is Stage.STOP else Kill(now)
        self._feed(self._dispatcher, event)
        if self._stage is Stage.KILL or not self._dispatcher.life.running:
            for worker in self._workers:
                self._feed(worker, event)
            if self._stage is Stage.KILL or not any(worker.life.running for worker in self._workers):
                self._feed(self._kvpool, event)
        if self._preflight.task is not None:
            self._preflight.task.process.signal(signal.SIGKILL)

    # ---- what the world is told ----

    def _publish(self) -> None:
        body = self._publisher.turn(time.monotonic(), self._view(), self._workers, self._preflight.facts, self._memory)
        if body is not None:
            self._dispatcher.tell_if_free({"t": "state", **body})

    def _view(self) -> health.View:
        kv = self._kvpool
        return health.View(
            kvpool=kv.life.state,
            reserved=(kv.page[Field.LOADED], kv.page[Field.TO_LOAD]),
            dispatcher=self._dispatcher.life.state,
            workers=[health.WorkerView(w.slot, w.life.state, w.busy, w.stalled, w.life.restarts, w.pid, w.resident,
                                       w.page[Field.LOADED], w.page[Field.TO_LOAD]) for w in self._workers],
            served=self._publisher.served,
            draining=self._stage > Stage.SERVE,
            failure=self._failure,
            checked=self._preflight.progress,
        )  # fmt: skip


HANDLERS = {
    signal.SIGTERM: Supervisor._on_stop,
    signal.SIGINT: Supervisor._on_stop,
    signal.SIGHUP: Supervisor._on_reload,
}
GIVEN_UP = {
    Exit.BOOT_LOOP: "failed to start five times in a row",
    Exit.CANNOT_LOAD: "the model cannot be loaded",
    Exit.WEIGHTS_CHANGED: "a weight file was changed while it was in use",
}
