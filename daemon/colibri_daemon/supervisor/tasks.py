"""Checking and verifying the model in short-lived children, so that the supervisor never opens it.

check() and verify() run in the child and import what they need there.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

from ..common.exit_codes import Exit
from ..common.facts import ModelFacts
from ..common.pages import Field, Page, make_pages
from ..common.settings import Settings
from .liveness import Watch
from .roles import Role, Roles
from .spawn import Death, Process, spawn

MOST_FINDINGS = 20  # an answer must fit into a pipe, which is read when the child has ended


class ModelError(Exception):
    """The model cannot be used. errors: one sentence each. code: what the service ends with."""

    def __init__(self, code: Exit, errors: list[str]) -> None:
        super().__init__(errors[0])
        self.code, self.errors = code, errors


class Task:
    """One short-lived child. Its answer is JSON through a pipe, its progress the page's LOADED and TO_LOAD. fresh: as
    in spawn()."""

    def __init__(self, role: Role, settings: Settings, page: Page, now: float, fresh: bool) -> None:
        self.role, self._page = role, page
        page.clear()
        self._pipe, theirs = os.pipe()
        try:
            self.process: Process = spawn(role, settings, (theirs,), theirs, settings, page, fresh=fresh)
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(theirs)
        self._watch = Watch(now)

    def stalled(self, now: float) -> float:
        """Seconds without progress."""
        return self._watch.look(now, self._page[Field.LOADED])

    def answer(self) -> dict[str, Any] | None:
        """What it answered, once it has ended. ModelError if that is a refusal, or no answer."""
        death = self.process.reap()
        if death is None:
            return None
        with os.fdopen(self._pipe) as pipe:
            text = pipe.read()
        body = json.loads(text) if text.endswith("}") else {"errors": [self._excuse(death)]}
        if "errors" in body or death.code:
            code = Exit.CANNOT_LOAD if death.code == Exit.CANNOT_LOAD else Exit.INTERNAL
            raise ModelError(code, body.get("errors", [self._excuse(death)]))
        return body

    def _excuse(self, death: Death) -> str:
        if death.code == Exit.USAGE:  # of born.py
            return "the package that is installed now cannot take over from the one that runs: restart the service"
        return f"{self.role.title}: {death}"


class Preflight:
    """What must be known before workers start. facts: once the model is checked; the dispatcher can work then.
    version: of the package that checked it. passed: workers can start. fresh: another interpreter checks."""

    def __init__(self, settings: Settings, roles: Roles, fresh: bool = False) -> None:
        self.settings, self._roles, self._fresh = settings, roles, fresh
        (self._page,) = make_pages(1)
        self.task: Task | None = None
        self.facts: ModelFacts | None = None
        self.version = ""
        self.passed = False

    def begin(self, now: float) -> None:
        """OSError if the system has no room for a child."""
        self._start(self._roles.check, now)

    def _start(self, role: Role, now: float) -> None:
        self.task = Task(role, self.settings, self._page, now, self._fresh)

    @property
    def progress(self) -> tuple[int, int] | None:
        """(bytes verified, bytes in all) while that goes on."""
        verifying = self.task is not None and self._page[Field.TO_LOAD]
        return (self._page[Field.LOADED], self._page[Field.TO_LOAD]) if verifying else None

    def advance(self, now: float) -> None:
        """Goes on if the task has ended. Raises ModelError; then no task is left."""
        if self.task is None:
            return
        task = self.task
        try:
            answer = task.answer()
        except ModelError:
            self.task = None
            raise
        if answer is None:
            return
        self.task = None
        if task.role is self._roles.check:
            self.version = answer.pop("version")
            self.facts = ModelFacts.from_wire(answer)
        if task.role is self._roles.check and self.settings.verify:
            self._start(self._roles.verify, now)
        else:
            self.passed = True

    def stuck(self, now: float) -> str:
        """Why it must be given up, if so."""
        if self.task is None or self.task.stalled(now) < self.settings.load_seconds:
            return ""
        return f"{self.task.role.title}: no progress for {self.settings.load_seconds:g} s"

    def kill(self) -> None:
        """Ends what runs; advance() sees it."""
        if self.task is not None:
            self.task.process.signal(signal.SIGKILL)


# ---- in the child --------------------------------------------------------------------------------------------------


def check(answer: int, settings: Settings, page: Page) -> int:
    """Answers with the model's facts and the package's version, or {"errors": […]}."""

    def run() -> dict[str, Any]:
        facts: ModelFacts = import_module("colibri_daemon.worker.check").check(settings)
        return facts.to_wire() | {"version": package_version()}

    return _reporting(answer, run)


def package_version() -> str:
    """As installed now."""
    return version("colibri-daemon")


def verify(answer: int, settings: Settings, page: Page) -> int:
    """Checks every byte; answers {} or {"errors": […]}."""

    def run() -> dict[str, Any]:
        module = import_module("colibri_engine.verify")
        page[Field.TO_LOAD] = module.stored_size(settings.model)

        def advance(count: int) -> None:
            page[Field.LOADED] += count

        findings = module.verify(settings.model, advance)
        return {"errors": [str(finding) for finding in findings[:MOST_FINDINGS]]} if findings else {}

    return _reporting(answer, run)


def _reporting(answer: int, run: Callable[[], dict[str, Any]]) -> int:
    try:
        body = run()
    except (import_module("colibri_engine.errors").ColibriError, OSError, ValueError) as e:
        body = {"errors": [str(e)]}
    with os.fdopen(answer, "w") as pipe:
        json.dump(body, pipe)
    return Exit.CANNOT_LOAD if "errors" in body else Exit.STOPPED
