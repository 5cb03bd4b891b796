"""Carries out a reload: reload.py says what is next, fleet.py holds what comes of it.

The configuration is read again as at the start, and the model checked by a fresh interpreter, which also tells whether
another version of the package is installed now. Nothing that serves is touched before the new generation is ready.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from ..common import log
from ..common.settings import SETTINGS, Settings, SettingsError
from . import reload
from .children import Child
from .fleet import MOST_EMPTYING, Fleet
from .log_levels import LogLevels
from .notify import Notifier
from .reload import Asked, Checked, Course, Do, Ending, Event, Failed, Free, Loaded, Report, State, Switched
from .roles import Roles
from .tasks import ModelError, Preflight

# The listening sockets outlive every reload.
UNCHANGEABLE = ("socket", "socket_mode", "socket_group", "admin_socket", "metrics")


class Reloader:
    """settings: of the generation that serves, or is to be the first. last: whether the last reload went well, when it
    ended by the wall clock, and when the last good one did; at first the service's own start."""

    def __init__(self, fleet: Fleet, roles: Roles, settings: Settings, notifier: Notifier, levels: LogLevels) -> None:
        self.settings = settings
        self.course = Course()
        self.last = {"ok": True, "at": (started := time.time()), "good": started}
        self._fleet, self._roles, self._notifier, self._levels = fleet, roles, notifier, levels
        self._log = log.get("reload")
        self._preflight: Preflight | None = None
        self._ended: list[Preflight] = []  # of reloads that failed, until their child is gone
        self._waiting: list[tuple[Child, int, int]] = []  # who asked: child, its epoch, the id of its message
        self._served_for: list[tuple[Child, int, int]] = []  # by the reload under way

    # ---- what the loop needs ----

    @property
    def preflights(self) -> Iterator[Preflight]:
        """Those whose child runs."""
        for preflight in (self._preflight, *self._ended):
            if preflight is not None and preflight.task is not None:
                yield preflight

    @property
    def reason(self) -> str:
        """What health says of it; nothing if none is under way."""
        words = reload.IN_WORDS.get(self.course.state)
        return f"reloading: {words}" if words else ""

    def ask(self, everything: bool = False, child: Child | None = None, id: int = 0) -> None:
        """child, id: who gets the answer."""
        self._log.info("reload asked for", everything=everything, state=self.course.state.value)
        if child is not None:
            self._waiting.append((child, child.epoch, id))
        if self.course.state is State.IDLE:
            self._notifier.send(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000)
        self._feed(Asked(time.monotonic(), everything))

    def fail(self, reason: str) -> None:
        self._feed(Failed(time.monotonic(), reason))

    def end(self) -> None:
        self._feed(Ending(time.monotonic()))

    def turn(self, now: float, free: bool) -> None:
        """Goes on as far as it can. free: nothing else speaks against a reload now."""
        self._look_at_tasks(now)
        if self._fleet.coming is not None and self._fleet.coming.spoiled:
            self.fail(self._fleet.coming.spoiled)
        while (event := self._next(now, free)) is not None:
            self._feed(event)

    def _look_at_tasks(self, now: float) -> None:
        for preflight in list(self.preflights):
            try:
                preflight.advance(now)
            except (ModelError, OSError) as e:
                if preflight is self._preflight:
                    self.fail("; ".join(e.errors) if isinstance(e, ModelError) else str(e))
        if self._preflight is not None and (reason := self._preflight.stuck(now)):
            self.fail(reason)
        self._ended = [preflight for preflight in self._ended if preflight.task is not None]

    def _next(self, now: float, free: bool) -> Event | None:
        """What has happened meanwhile."""
        fleet, coming = self._fleet, self._fleet.coming
        match self.course.state:
            case State.WAITING if free and len(fleet.emptying) < MOST_EMPTYING:
                return Free(now)
            case State.CHECKING if self._preflight is not None and self._preflight.passed:
                return Checked(now)
            case State.LOADING if coming is not None and coming.loaded:
                return Loaded(now)
            case State.SWITCHING if coming is not None and coming.loaded and coming.dispatcher.ready:
                return Switched(now)
        return None

    # ---- what is done ----

    def _feed(self, event: Event) -> None:
        before = self.course
        self.course, actions = reload.advance(before, event)
        if self.course.state is not before.state:
            took = 0.0 if before.state is State.IDLE else round(event.now - before.since, 3)
            self._log.info("reload", stage=self.course.state.value, after=before.state.value, seconds=took)
        for action in actions:
            try:
                self._carry_out(action, event.now)
            except (OSError, ValueError, SettingsError) as e:
                return self.fail("; ".join(e.problems) if isinstance(e, SettingsError) else str(e))

    def _carry_out(self, action: reload.Action, now: float) -> None:
        match action:
            case Do.BEGIN:
                self._begin(now)
            case Do.LAUNCH:
                self._launch()
            case Do.SWITCH:
                self._fleet.switch()
            case Do.SERVE:
                self._serve(now)
            case Do.ABANDON:
                self._drop_preflight()
                self._fleet.abandon()
            case Report(reason, seconds):
                self._report(reason, seconds)

    def _begin(self, now: float) -> None:
        self._served_for, self._waiting = self._waiting, []
        settings = self.settings.again()
        if problems := refusals(self.settings, settings):
            raise SettingsError(problems)
        for warning in settings.warnings:
            self._log.warning("configuration", warning=warning)
        self._preflight = Preflight(settings, self._roles, fresh=True)
        self._preflight.begin(now)

    def _launch(self) -> None:
        checked = self._preflight
        assert checked is not None
        assert checked.facts is not None
        generation = self._fleet.make(checked.settings, checked.facts, checked.version, self.course.everything)
        self._fleet.prepare(generation)
        self._log.info("generation comes", generation=generation.number, version=checked.version,
                       model=checked.facts.name, id=checked.facts.id, workers=len(generation.workers),
                       pool=generation.pool.number, new_dispatcher=generation.dispatcher is not self._fleet.dispatcher)

    def _serve(self, now: float) -> None:
        self._drop_preflight()
        self._fleet.serve(now)
        assert self._fleet.serving is not None
        self.settings = self._fleet.serving.settings
        log.setup("supervisor", self.settings)
        self._levels.apply()

    def _drop_preflight(self) -> None:
        if self._preflight is not None:
            self._preflight.kill()
            self._ended.append(self._preflight)
            self._preflight = None

    def _report(self, reason: str, seconds: float) -> None:
        fleet = self._fleet
        serving = fleet.serving.number if fleet.serving else 0
        now = time.time()
        self.last = {"ok": not reason, "at": now, "good": self.last["good"] if reason else now}
        if reason:
            self._log.error("reload failed, nothing was changed", reason=reason, generation=serving,
                            seconds=round(seconds, 3))
        else:
            self._log.info("reload done", generation=serving, seconds=round(seconds, 3))
        asked, self._served_for = self._served_for, []
        if self.course.state in (State.IDLE, State.OVER):  # nobody is left for another one
            asked += self._waiting
            self._waiting = []
        if self.course.state is State.IDLE:
            self._notifier.send(READY=1)
        for child, epoch, id in asked:
            if child.epoch == epoch:
                child.tell({"t": "admin", "id": id, "ok": not reason, "error": reason,
                            "result": {"generation": serving, "seconds": round(seconds, 3)}})


def refusals(old: Settings, new: Settings) -> list[str]:
    """Why the new settings cannot take the place of the old ones in a running service."""
    problems = [f"{new.origin(name)}: {name} cannot be changed while the daemon runs: restart it, or set it back to "
                f"{SETTINGS[name].text(getattr(old, name)) or 'nothing'}"
                for name in UNCHANGEABLE if name in SETTINGS and getattr(new, name) != getattr(old, name)]
    return problems if new.model is not None else [*problems, "model: is not set"]
