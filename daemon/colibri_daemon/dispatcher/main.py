"""The dispatcher process: puts its parts together and runs their loop."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import uvloop

from ..common import log
from ..common.exit_codes import Exit
from ..common.facts import ModelFacts
from ..common.pages import Field, Page, State
from ..common.settings import Settings
from .admission import Admission
from .channel import Outbox
from .control import Control
from .health import HealthBoard
from .pool_link import PoolLink
from .requests import Requests
from .server import Server
from .session import Timeouts
from .stats import Stats
from .workers import WorkerPool

BUSY_TICK_SECONDS, IDLE_TICK_SECONDS = 0.1, 0.5
FLUSH_SECONDS = 2.0  # for the last words to be read after SIGTERM
_log = log.get("dispatcher")


class Dispatcher:
    """Owns control and all that comes over it; the listening socket is borrowed. finished: set to the exit code."""

    def __init__(self, loop: asyncio.AbstractEventLoop, listener: socket.socket, control: socket.socket, page: Page,
                 settings: Settings, facts: ModelFacts, timeouts: Timeouts = Timeouts(),  # noqa: B008
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.finished: asyncio.Future[int] = loop.create_future()
        self._loop, self._page, self._clock = loop, page, clock
        self._outbox = Outbox(loop, clock)
        self._stats, self.health = Stats(), HealthBoard(clock)
        self.workers, self.pool = WorkerPool(self._outbox), PoolLink(self._outbox)
        admission = Admission(facts, frozenset(settings.trusted_uids), draw_seed)
        self.requests = Requests(loop, clock, settings, facts, admission, self.workers, self.pool, self._stats,
                                 self.health, self._wake)
        self.server = Server(self._outbox, settings, facts, self.requests, self.workers, self.pool, self._stats,
                             self.health, timeouts)
        self._control = Control(loop, control, {"worker": self._worker, "pool": self._pool, "state": self._state,
                                                "drain": self._drain}, self._orphaned)
        self._stop_at = self._drain_at = float("inf")
        self._told_drained = False
        self._pause_seconds = timeouts.pause
        self.server.listen(loop, listener)
        page[Field.STATE] = State.READY
        self._timer: asyncio.Handle = loop.call_soon(self._tick)
        self._due = 0.0  # of the next tick, in the loop's time
        self._control.say("ready")

    # ---- the supervisor's words ------------------------------------------------------------------------------------

    def _worker(self, message: dict[str, Any], fds: list[int]) -> None:
        if not fds:  # there was no descriptor left to receive it
            _log.error("a worker's link was lost on its way; raise the limit of open files", worker=message["slot"])
            return
        self.workers.attach(message["slot"], message["epoch"], message["pid"], socket.socket(fileno=fds[0]))

    def _pool(self, _: dict[str, Any], fds: list[int]) -> None:
        if not fds:
            _log.error("the link to the KV pool was lost on its way; raise the limit of open files")
            return
        self.pool.attach(socket.socket(fileno=fds[0]))

    def _state(self, message: dict[str, Any], _: list[int]) -> None:
        self.health.update({name: value for name, value in message.items() if name != "t"})

    def _drain(self, message: dict[str, Any], _: list[int]) -> None:
        self._begin_drain(message["seconds"])
        self._wake(0)

    def _orphaned(self) -> None:
        _log.error("the supervisor is gone")
        self._finish(Exit.INTERNAL)

    # ---- stopping --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """SIGTERM: what is live ends now, the last words are sent, then the process."""
        if self._stop_at != float("inf"):
            return
        self._begin_drain(0)
        self.requests.end_all()
        self._stop_at = self._clock() + FLUSH_SECONDS
        self._wake(0)

    def close(self) -> None:
        self._timer.cancel()
        self.server.close()
        self.workers.close()
        self.pool.close()
        self._control.close()

    def _begin_drain(self, seconds: float) -> None:
        """No new requests; live ones may go on for so long."""
        self.requests.draining = self.health.draining = True
        self._drain_at = self._clock() + seconds
        self.server.go_away(seconds)

    def _finish(self, code: int) -> None:
        if not self.finished.done():
            self.finished.set_result(int(code))

    # ---- time ------------------------------------------------------------------------------------------------------

    def _wake(self, seconds: float = BUSY_TICK_SECONDS) -> None:
        """Something needs the next tick this soon. Never puts it off."""
        due = self._loop.time() + seconds
        if due < self._due:
            self._timer.cancel()
            self._timer, self._due = self._loop.call_at(due, self._tick), due

    def _tick(self) -> None:
        self._due = float("inf")
        try:
            self._look_around(self._clock())
        finally:
            busy = self.requests.live or self.requests.draining or not self.server.idle
            self._wake(BUSY_TICK_SECONDS if busy else IDLE_TICK_SECONDS)

    def _look_around(self, now: float) -> None:
        page = self._page
        page[Field.PROGRESS] += 1
        page[Field.BUSY] = self.requests.running
        page[Field.BEAT_NS] = time.monotonic_ns()
        self.server.tick(now)
        self.requests.tick(now, now - self._pause_seconds)
        self._go_on_stopping(now)

    def _go_on_stopping(self, now: float) -> None:
        if now >= self._drain_at:
            self._drain_at = float("inf")
            self.requests.end_all()
        if self.requests.draining and not self.requests.live and not self._told_drained:
            self._told_drained = True
            self._control.say("drained")
        if now >= self._stop_at or self._stop_at != float("inf") and self.server.idle:
            self._finish(Exit.STOPPED)


def draw_seed() -> int:
    return int.from_bytes(os.urandom(8), "little")


def run(listener: socket.socket, control: socket.socket, page: Page, settings: Settings, facts: ModelFacts) -> int:
    """The life of the process; its exit code. listener: bound and listening. page: this process writes it."""
    allow_open_files()
    loop = uvloop.new_event_loop()
    loop.set_exception_handler(_report)
    dispatcher = Dispatcher(loop, listener, control, page, settings, facts)
    loop.add_signal_handler(signal.SIGTERM, dispatcher.stop)
    try:
        return loop.run_until_complete(dispatcher.finished)
    finally:
        page[Field.STATE] = State.STOPPING
        dispatcher.close()
        loop.close()


def allow_open_files() -> None:
    """As many as the system lets us: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _report(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A callback raised: a fault of ours that only it is hurt by."""
    error = context.get("exception")
    _log.error("a callback failed", what=str(context.get("message")), error=repr(error))
