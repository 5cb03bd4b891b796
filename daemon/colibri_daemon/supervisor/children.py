"""The supervisor's children: for each a slot with its page and its life, and its process while there is one.

What differs between kinds is in the subclasses: how it is started, what proves it, what its progress is.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..common import ipc
from ..common.facts import ModelFacts
from ..common.pages import Field, Page
from ..common.settings import Settings
from .lifecycle import Life, State
from .liveness import Watch
from .spawn import Death, Process, Role, spawn


class Child:
    """One slot. told: the fields of its "ready" message. reason: of its "failed" message. stalled: seconds without
    progress while it should have made some. epoch: tells its processes apart; grows with each."""

    def __init__(self, role: Role, page: Page) -> None:
        self.role, self.page = role, page
        self.life = Life()
        self.process: Process | None = None
        self.control: socket.socket | None = None
        self.epoch = 0
        self.told: dict[str, Any] = {}
        self.reason = ""
        self.stalled = 0.0
        self.resident = 0
        self._watch = Watch(0.0)
        self._outbox: deque[tuple[dict[str, Any], socket.socket | None]] = deque()

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    # ---- what subclasses say ----

    @property
    def proven(self) -> bool:
        """Whether the process that runs now has done what it is for."""
        raise NotImplementedError

    def _reading(self) -> tuple[int, bool]:
        """A counter of progress, and whether it has to move."""
        raise NotImplementedError

    # ---- the process ----

    def start(self, now: float, settings: Settings, facts: ModelFacts, first: tuple[socket.socket, ...] = (),
              last: tuple[object, ...] = (), fds: tuple[int, ...] = ()) -> None:  # fmt: skip
        """Forks. The role's arguments are (*first, control, page, settings, facts, *last); it keeps the sockets of
        ``first`` and the descriptors ``fds``. OSError if the system has no room."""
        self.page.clear()
        ours, theirs = ipc.control()
        try:
            kept = (*(sock.fileno() for sock in (*first, theirs)), *fds)
            self.process = spawn(self.role, settings, kept, *first, theirs, self.page, settings, facts, *last)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.control, self._watch, self.told, self.reason = ours, Watch(now), {}, ""
        self.epoch = self.life.spawns + 1

    def judge(self, now: float) -> float:
        """Looks at the page; seconds without progress."""
        loading = self.life.state is State.LOADING
        counter, active = (self.page[Field.LOADED], True) if loading else self._reading()
        self.stalled = self._watch.look(now, (loading, counter), active)
        return self.stalled

    def reap(self) -> Death | None:
        """How the process ended, if it has; its descriptors are closed then."""
        death = self.process.reap() if self.process else None
        if death is not None:
            self.process, self.resident, self.stalled = None, 0, 0.0
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

    def _reading(self) -> tuple[int, bool]:
        return self.page[Field.PROGRESS], True


class Worker(Child):
    """Its first argument is its end of a link to the dispatcher."""

    def __init__(self, role: Role, page: Page, slot: int) -> None:
        super().__init__(replace(role, title=f"{role.title} {slot}"), page)
        self.slot = slot

    @property
    def proven(self) -> bool:
        return self.page[Field.STEPS] > 0

    def _reading(self) -> tuple[int, bool]:
        return self.page[Field.PROGRESS], self.busy

    @property
    def busy(self) -> bool:
        return self.process is not None and self.page[Field.BUSY] > 0
