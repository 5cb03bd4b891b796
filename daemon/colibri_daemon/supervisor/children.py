"""The supervisor's children: for each a slot with its page and its life, and its process while there is one.

What differs between kinds is in the subclasses: how it is started, what proves it, what its progress is.
"""

from __future__ import annotations

import signal
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from enum import IntEnum
from typing import Any

from ..common import ipc
from ..common.facts import ModelFacts
from ..common.pages import Field, Page
from ..common.settings import Settings
from .lifecycle import Life, State
from .liveness import Watch
from .roles import Role
from .spawn import Death, Process, spawn


class Goal(IntEnum):
    """What is wanted of a child. Only grows."""

    WAIT = 0  # not to be started yet
    RUN = 1
    STOP = 2  # to end in good order
    KILL = 3


class Child:
    """One slot. told: the fields of its last "ready" message, be it of an earlier process. reason: of its "failed"
    message. stalled: seconds without progress. started: when the process was. epoch: tells processes apart, as drawn
    from ``epochs`` at each start. fresh: it is started as another interpreter, with the package as it is installed
    then. replaced: we have ended the process to have another one."""

    def __init__(self, role: Role, page: Page, epochs: Iterator[int], fresh: bool) -> None:
        self.role, self.page, self.fresh = role, page, fresh
        self.life = Life()
        self.goal = Goal.WAIT
        self.replaced = False
        self.process: Process | None = None
        self.control: socket.socket | None = None
        self.epoch = 0
        self.started = 0.0
        self.told: dict[str, Any] = {}
        self.reason = ""
        self.stalled = 0.0
        self.resident = 0
        self._epochs = epochs
        self._watch = Watch(0.0)
        self._outbox: deque[tuple[dict[str, Any], socket.socket | None]] = deque()

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    @property
    def ready(self) -> bool:
        return self.life.state is State.READY

    def aim(self, goal: Goal) -> None:
        self.goal = max(self.goal, goal)

    # ---- what subclasses say ----

    @property
    def proven(self) -> bool:
        """Whether the process that runs now has done what it is for."""
        raise NotImplementedError

    def _reading(self) -> tuple[int, ...]:
        """What changes with progress; at least twice a second."""
        raise NotImplementedError

    # ---- the process ----

    def start(self, now: float, settings: Settings, facts: ModelFacts | None, first: tuple[socket.socket, ...] = (),
              last: tuple[object, ...] = (), fds: tuple[int, ...] = ()) -> None:  # fmt: skip
        """Starts a process. The role's arguments are (*first, control, page, settings, facts, *last); it keeps the
        sockets of ``first`` and the descriptors ``fds``. OSError if the system has no room."""
        self.page.clear()
        ours, theirs = ipc.control()
        try:
            kept = (*(sock.fileno() for sock in (*first, theirs)), *fds)
            self.process = spawn(self.role, settings, kept, *first, theirs, self.page, settings, facts, *last,
                                 fresh=self.fresh)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.control, self._watch, self.reason = ours, Watch(now), ""
        self.started = now
        self.replaced = False
        self.epoch = next(self._epochs)

    def judge(self, now: float) -> float:
        """Looks at the page; seconds without progress."""
        loading = self.life.state is State.LOADING
        reading = (self.page[Field.LOADED],) if loading else self._reading()
        self.stalled = self._watch.look(now, (loading, *reading))
        return self.stalled

    def replace(self) -> None:
        """Another process is to take its place. For those that may be killed at any moment."""
        if self.process is not None:
            self.replaced = True
            self.process.signal(signal.SIGKILL)

    def reap(self) -> Death | None:
        """How the process ended, if it has; its descriptors are closed then."""
        death = self.process.reap() if self.process else None
        if death is not None:
            self.process, self.resident, self.stalled = None, 0, 0.0
            self.page.clear_gauges()
            self.hang_up()
        return death

    def hang_up(self) -> None:
        """Closes the control socket and what was still to be sent."""
        if self.control is not None:
            self.control.close()
            self.control = None
        while self._outbox:
            _close(self._outbox.popleft()[1])

    # ---- messages ----

    def tell(self, message: dict[str, Any], end: socket.socket | None = None) -> None:
        """Sends a message that must not be lost, now or by a later flush(); ``end`` goes with it and is closed here."""
        if self.control is None:
            return _close(end)
        self._outbox.append((message, end))
        self.flush()

    def tell_if_free(self, message: dict[str, Any]) -> None:
        """Sends a message that a newer one will replace, unless the child is behind with its reading."""
        if self.control is not None and not self._outbox:
            ipc.send_control(self.control, message)

    def flush(self) -> None:
        while self._outbox and self.control is not None:
            message, end = self._outbox[0]
            if not ipc.send_control(self.control, message, (end.fileno(),) if end else ()):
                return
            self._outbox.popleft()
            _close(end)

    def received(self) -> Iterator[dict[str, Any]]:
        """The messages that have come in. Closes the control socket at its end."""
        with suppress(BlockingIOError):
            while self.control is not None:
                try:
                    packet = ipc.receive_control(self.control)
                except ConnectionResetError:  # it ended with messages of ours unread: said once, before its last words
                    continue
                except ValueError:  # it speaks nonsense
                    packet = None
                if packet is None:
                    return self.hang_up()
                yield packet[0]


def _close(end: socket.socket | None) -> None:
    if end is not None:
        end.close()


class Steady(Child):
    """Kvpool or dispatcher: proven once ready, and its loop turns about twice a second even with nothing to do."""

    @property
    def proven(self) -> bool:
        return self.life.state is State.READY

    def _reading(self) -> tuple[int, ...]:
        return (self.page[Field.PROGRESS],)


class Worker(Child):
    """Its first argument is its end of a link to the dispatcher. generation: its number."""

    def __init__(self, role: Role, page: Page, epochs: Iterator[int], fresh: bool, slot: int, generation: int) -> None:
        super().__init__(replace(role, title=f"{role.title} {slot}"), page, epochs, fresh)
        self.slot, self.generation = slot, generation

    @property
    def proven(self) -> bool:
        """It has completed a step, or died in one: that is then the request's doing, not a failed start."""
        return self.page[Field.STEPS] > 0 or self.page[Field.KEYS] > 0

    def _reading(self) -> tuple[int, ...]:
        """With work to do only the engine's counter counts: a loop that turns and computes nothing is stuck too."""
        return (1, self.page[Field.PROGRESS]) if self.busy else (0, self.page[Field.BEAT_NS])

    @property
    def busy(self) -> bool:
        return self.process is not None and self.page[Field.BUSY] > 0
