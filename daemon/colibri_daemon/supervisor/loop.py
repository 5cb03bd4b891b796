"""The supervisor: one thread, one loop, in a fixed order: signals, messages and deaths, liveness, reload, top up,
publish.

It never computes, never waits for a child or a client, and writes no shared memory but its own pages and that of a slot
that has no process. What happens to a child is decided by lifecycle.py, the course of a reload by reload.py, what
clients are told by health.py.
"""

from __future__ import annotations

import math
import select
import signal
import time
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

from ..common import log
from ..common.exit_codes import Exit
from ..common.settings import Settings
from .children import Child, Goal, Worker
from .deaths import cause
from .fdstore import FdStore
from .fleet import Fleet
from .generation import Dispatcher, Pool
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
from .log_levels import LogLevels
from .notify import Notifier
from .publish import Publisher, about, view_of
from .reloading import Reloader
from .roles import Roles
from .signals import Recorder
from .sockets import Listener
from .tasks import ModelError, Preflight

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

    def __init__(self, settings: Settings, listener: Listener, admin: Listener, notifier: Notifier,
                 roles: Roles, metrics: Listener | None = None, store: FdStore | None = None) -> None:
        """metrics: where the metrics process listens, if there is to be one. store: with what the former life of the
        service left."""
        self._log = log.get("supervisor")
        self._preflight = Preflight(settings, roles)
        self._fleet = Fleet(roles, listener, admin, metrics, settings, store or FdStore(notifier))
        self._log_levels = LogLevels()
        self._reloader = Reloader(self._fleet, roles, settings, notifier, self._log_levels)
        self._cap = RestartCap()
        self._publisher = Publisher(listener.path, notifier)
        self._stage, self._until = Stage.SERVE, NEVER
        self._code, self._failure = Exit.STOPPED, ""
        self._changed = False  # since the turn looked at it: another turn is due

    @property
    def _settings(self) -> Settings:
        return self._reloader.settings

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
            self._go_on()
            self._top_up()
            self._publish()
        self._fleet.close(orderly=not any(child.life.running for child in self._fleet.children))
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
        for child in self._fleet.children:
            if child.process is not None:
                yield child.process.pidfd
            if child.control is not None:
                yield child.control.fileno()
        for preflight in (self._preflight, *self._reloader.preflights):
            if preflight.task is not None:
                yield preflight.task.process.pidfd

    def _over(self) -> bool:
        if self._stage < Stage.STOP:
            return False
        tasks = self._preflight.task is not None or any(self._reloader.preflights)
        gone = not tasks and not any(child.life.running for child in self._fleet.children)
        return gone or (self._stage is Stage.KILL and time.monotonic() >= self._until)

    def _timeout(self) -> float:
        if self._changed:
            return 0.0
        times = [self._publisher.due, self._until]
        for child in self._fleet.children:
            wakes = child.life.wakes() if self._fleet.may_start(child) or child.life.running else NEVER
            times.append(max(wakes, self._cap.free_at()) if child.life.spawns and not child.life.running else wakes)
        return max(0.0, min(times) - time.monotonic())

    # ---- signals ----

    def _on_stop(self, number: signal.Signals) -> None:
        self._log.info("asked to stop", signal=number.name, again=self._stage > Stage.SERVE)
        self._go_to(Stage(min(self._stage + 1, Stage.KILL)))

    def _on_reload(self, number: signal.Signals) -> None:
        self._reloader.ask()

    # ---- messages and deaths ----

    def _hear_all(self, woken: set[int]) -> None:
        for child in self._fleet.children:
            if child.control is not None and child.control.fileno() in woken:
                self._hear(child)

    def _hear(self, child: Child) -> None:
        for message in child.received():
            self._handle(child, message)

    def _handle(self, child: Child, message: dict[str, Any]) -> None:
        match message:
            case {"t": "ready", **told}:
                child.told = told
                if isinstance(child, Worker):
                    self._fleet.census.loaded(child, time.monotonic() - child.started)
                self._log.debug("ready", child=child.role.title, child_pid=child.pid, **told)
                self._feed(child, Ready(time.monotonic()))
            case {"t": "failed", "reason": reason}:
                child.reason = str(reason)
            case {"t": "kill", "kind": kind, "slot": slot, "epoch": epoch, "reason": reason} if (
                    not isinstance(child, Worker)):
                self._kill_peer(child, (kind, slot, epoch), reason)
            case {"t": "held", "slabs": int(slabs)} if isinstance(child, Pool):
                self._fleet.held(child, slabs)
            case {"t": str()} if isinstance(child, Dispatcher):
                self._handle_dispatcher(child, message)
            case _:
                self._log.warning("unexpected message", child=child.role.title, type=str(message.get("t")))

    def _handle_dispatcher(self, child: Dispatcher, message: dict[str, Any]) -> None:
        match message:
            case {"t": "drained"}:
                # One that was stopped by hand says it too.
                child.drained = child.drained or child.retired or self._stage is Stage.DRAIN
            case {"t": "empty", "generation": number}:
                self._fleet.emptied(child, number)
            case {"t": "admin", "id": int(id), "do": "reload", **options}:
                self._reloader.ask(bool(options.get("everything")), child, id)
            case {"t": "admin", "id": int(id), "do": "log_level", "level": level, "role": role}:
                answer = self._log_levels.ask(level, role, self._fleet.children)
                child.tell({"t": "admin", "id": id, **answer})
            case _:
                self._log.warning("unexpected message", child=child.role.title, type=message["t"])

    def _kill_peer(self, accuser: Child, accused: tuple[str, int, int], reason: str) -> None:
        """They are at odds. What a worker has in the arena can be used again only when it is gone."""
        kind, slot, epoch = accused
        peers: list[Child] = [*self._fleet.dispatchers]
        if kind == "worker":
            peers = [worker for worker in self._fleet.workers if worker.slot == slot]
        child = next((peer for peer in peers if peer.epoch == epoch), None)
        if self._stage < Stage.STOP and child is not None and child.process is not None:
            self._log.error("a peer has a process ended", by=accuser.role.title, child=child.role.title,
                            child_pid=child.pid, reason=reason)
            child.process.signal(signal.SIGKILL)

    def _reap(self, woken: set[int]) -> None:
        for child in self._fleet.children:
            if child.process is not None and child.process.pidfd in woken:
                self._bury(child)

    def _bury(self, child: Child) -> None:
        self._hear(child)  # its last words say why
        pid, proven, death = child.pid, child.proven, child.reap()
        if death is None:
            return
        orderly = child.life.state is State.STOPPING or death.code == Exit.STOPPED or child.replaced
        write = self._log.info if orderly else self._log.error
        write("process ended", child=child.role.title, child_pid=pid, how=str(death),
              **{name: text for name, text in (("reason", child.reason), ("trace", death.trace)) if text})
        foreign = self._publisher.served and cause(death.code, child.life.state) == "killed"
        now = time.monotonic()
        self._fleet.census.died(child, death)
        self._fleet.buried(child, death, now)
        self._feed(child, Exited(now, death.code, proven, foreign))

    # ---- liveness ----

    def _judge(self) -> None:
        now = time.monotonic()
        for child in self._fleet.children:
            if child.life.state in (State.LOADING, State.READY) and child.judge(now) >= self._bound(child):
                self._log.error("no progress, the process is ended", child=child.role.title, child_pid=child.pid,
                                seconds=round(child.stalled, 1), state=child.life.state.value)
                self._no_progress(child)
                self._feed(child, Hung(now))

    def _bound(self, child: Child) -> float:
        owner = self._fleet.owner(child)
        settings = owner.settings if owner else self._settings
        return settings.load_seconds if child.life.state is State.LOADING else settings.hang_seconds

    def _no_progress(self, child: Child) -> None:
        """Whoever waits for a reload need not wait for five attempts."""
        coming = self._fleet.coming
        if coming is not None and self._fleet.owner(child) is coming and child.life.state is State.LOADING:
            self._reloader.fail(f"{child.role.title}: no progress for {child.stalled:.1f} s while loading")

    # ---- going on ----

    def _go_on(self) -> None:
        """What follows from all that has happened: the model check, a reload, old processes, the end."""
        now, self._changed = time.monotonic(), False
        self._check_model(now)
        self._fleet.look_at_weights(now)
        self._reloader.turn(now, free=self._publisher.served and self._stage is Stage.SERVE)
        self._fleet.tidy(now)
        self._fleet.beat(now, self._publisher.served)
        self._wind_down(now)

    def _check_model(self, now: float) -> None:
        """Of the first generation."""
        try:
            self._preflight.advance(now)
            if self._preflight.facts is not None and self._fleet.serving is None and self._stage < Stage.STOP:
                self._fleet.begin(self._fleet.make(self._settings, self._preflight.facts, self._fleet.version))
        except ModelError as e:
            for error in e.errors if self._stage < Stage.STOP else ():
                self._log.error("the model cannot be used", error=error)
            self._fail(e.code, e.errors[0])
        except (OSError, ValueError) as e:
            self._fail(Exit.CANNOT_LOAD, str(e))
        if reason := self._preflight.stuck(now):
            self._fail(Exit.CANNOT_LOAD, reason)
        if self._preflight.passed and self._fleet.serving is not None:
            self._fleet.serving.aim(Goal.RUN)

    # ---- starting and ending children ----

    def _top_up(self) -> None:
        now = time.monotonic()
        for child in self._fleet.children:
            if child.goal >= Goal.STOP:
                self._feed(child, Stop(now) if child.goal is Goal.STOP else Kill(now))
            if child.life.running or self._fleet.may_start(child):
                self._feed(child, Tick(now))
            child.flush()

    def _feed(self, child: Child, event: Event) -> None:
        before = child.life
        child.life, actions = advance(before, event)
        self._changed = self._changed or child.life.state is not before.state
        for action in actions:
            match action:
                case Spawn():
                    self._start(child)
                case Signal(number) if child.process is not None:
                    self._fleet.doom(child)
                    child.process.signal(number)
                case GiveUp(code):
                    self._given_up(child, code)

    def _given_up(self, child: Child, code: Exit) -> None:
        reason = child.reason or f"{child.role.title}: {GIVEN_UP[code]}"
        owner = self._fleet.owner(child)
        if owner is self._fleet.serving:
            self._fail(code, reason)
        elif owner is not None and owner is self._fleet.coming:
            self._reloader.fail(reason)
        else:  # nothing that serves needs it
            self._log.error("a process is given up until the next restart", child=child.role.title, reason=reason)

    def _start(self, child: Child) -> None:
        now = time.monotonic()
        if child.life.spawns:
            if now < self._cap.free_at():
                return
            self._cap.take(now)
        if isinstance(child, Pool):
            for generation in self._fleet.users(child):
                for worker in generation.workers:
                    self._hear(worker)  # who is ready may have slabs
        try:
            self._fleet.launch(child, now)
        except OSError as e:
            self._log.error("a process cannot be started", child=child.role.title, error=str(e))
            return self._feed(child, Exited(now, Exit.INTERNAL))
        self._log_levels.tell(child)
        self._feed(child, Spawned(now))
        self._log.debug("started", child=child.role.title, child_pid=child.pid)

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
        self._stage, self._changed = stage, True
        self._until = {
            Stage.DRAIN: now + self._settings.drain_seconds + DRAIN_GRACE,
            Stage.KILL: now + KILL_SECONDS,
        }.get(stage, NEVER)
        self._reloader.end()
        if stage is Stage.DRAIN:
            for dispatcher in self._fleet.dispatchers:
                dispatcher.tell({"t": "drain", "seconds": self._settings.drain_seconds})

    def _wind_down(self, now: float) -> None:
        """What each stage asks for; safe to ask again. Dispatchers stop before the workers, so that they can end what
        is left in their own words."""
        fleet = self._fleet
        if self._stage is Stage.DRAIN:
            live = [dispatcher for dispatcher in fleet.dispatchers if dispatcher.life.state is State.READY]
            if now >= self._until or all(dispatcher.drained for dispatcher in live):
                self._go_to(Stage.STOP)
        if self._stage < Stage.STOP:
            return
        goal = Goal.STOP if self._stage is Stage.STOP else Goal.KILL
        ranks: tuple[list[Child], ...] = ([*fleet.dispatchers], [*fleet.workers], [*fleet.pools],
                                          [fleet.exporter] if fleet.exporter else [])
        for rank in ranks:
            for child in rank:
                child.aim(goal)
            if goal is Goal.STOP and any(child.life.running for child in rank):
                break
        self._preflight.kill()

    # ---- what the world is told ----

    def _publish(self) -> None:
        view = view_of(self._fleet, self._settings, self._preflight.progress, self._publisher.served,
                       draining=self._stage > Stage.SERVE, failure=self._failure)
        body = self._publisher.turn(time.monotonic(), view, self._fleet.serving, self._reloader.reason)
        if body is not None:
            state = {"t": "state", **body, "reloaded": self._reloader.last}
            for dispatcher in self._fleet.dispatchers:
                dispatcher.tell_if_free(state)
            if self._fleet.exporter:
                self._fleet.exporter.tell_if_free(state | {"about": about(self._fleet)})


HANDLERS = {
    signal.SIGTERM: Supervisor._on_stop,
    signal.SIGINT: Supervisor._on_stop,
    signal.SIGHUP: Supervisor._on_reload,
}
GIVEN_UP = {
    Exit.BOOT_LOOP: "failed to start five times in a row",
    Exit.CANNOT_LOAD: "the model cannot be loaded",
}
