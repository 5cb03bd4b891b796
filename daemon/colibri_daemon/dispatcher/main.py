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
from colibri_protocol.limits import MAX_DEADLINE_MS

from ..common import log, process
from ..common.counters import Counters
from ..common.exit_codes import Exit
from ..common.facts import ModelFacts
from ..common.metrics import Source
from ..common.pages import Book, Field, Page, State
from ..common.settings import Settings
from .admin import AdminServer, Levers
from .channel import Outbox
from .control import Control
from .gauges import Gauges
from .generation import Generation, Generations
from .health import HealthBoard
from .losses import Death
from .requests import Requests
from .server import Server
from .session import Timeouts
from .stats import Stats
from .watch import Watch
from .workers import Worker, WorkerId

BUSY_TICK_SECONDS, IDLE_TICK_SECONDS = 0.1, 0.5
RETIRED_SECONDS = MAX_DEADLINE_MS / 1000  # for what is live when another dispatcher takes over
DRAINED_BY_HAND = "drained by an administrator; ADMIN_RESUME takes that back"
FLUSH_SECONDS = 2.0  # for the last words to be read after SIGTERM
_log = log.get("dispatcher")


class Dispatcher:
    """Owns control and all that comes over it; the listening sockets are borrowed. finished: set to the exit code."""

    def __init__(self, loop: asyncio.AbstractEventLoop, listener: socket.socket, admin: socket.socket,
                 control: socket.socket, page: Page, settings: Settings, facts: ModelFacts,
                 numbers: tuple[int, int] = (1, 1), timeouts: Timeouts = Timeouts(),  # noqa: B008
                 clock: Callable[[], float] = time.monotonic, book: Book | None = None) -> None:
        self.finished: asyncio.Future[int] = loop.create_future()
        self._loop, self._page, self._clock = loop, page, clock
        self._outbox = Outbox(loop, clock)
        self._stats, self.health = Stats(Counters(page.counters, Source.DISPATCHER)), HealthBoard(clock)
        self._book, self._watch = book, Watch(loop, self._ended)
        self.generations = Generations(self._outbox, clock, draw_seed, self._distrust, self._watch.begin, numbers,
                                       settings, facts)
        self.requests = Requests(loop, clock, self.generations, self._stats, self.health, self._wake)
        self.server = Server(self._outbox, self.generations, self.requests, self._stats, self.health, timeouts, book)
        self._gauges = Gauges(loop, self.server.show)
        self._outbox.stir = self._gauges.stir
        self._control = Control(loop, control, {
            "worker": self._worker, "pool": self._pool, "doomed": self._doomed, "dead": self._dead,
            "generation": self._generation, "serve": self._serve, "forget": self._forget, "state": self._state,
            "drain": self._drain, "retire": self._retire, "admin": self._answer, "log_level": self._log_level,
        }, self._orphaned)  # fmt: skip
        self.admin = AdminServer(self.server, Levers(self._drain_by_hand, self._resume, self._control.say))
        self._stop_at = self._drain_at = float("inf")
        self._told_drained = False
        self._by_hand = False  # draining because an administrator said so, and for no other reason
        self._told_empty: set[int] = set()
        self._doomed_workers: set[WorkerId] = set()  # by the supervisor, and not reaped yet
        self._pause_seconds = timeouts.pause
        self.server.listen(loop, listener)
        self.admin.listen(loop, admin)
        page[Field.STATE] = State.READY
        self._timer: asyncio.Handle = loop.call_soon(self._tick)
        self._due = 0.0  # of the next tick, in the loop's time
        self._control.say("ready")

    # ---- the supervisor's words ------------------------------------------------------------------------------------

    def _worker(self, message: dict[str, Any], fds: list[int]) -> None:
        if not fds:  # there was no descriptor left to receive it
            _log.error("a worker's link was lost on its way; raise the limit of open files", worker=message["slot"])
            return
        link = socket.socket(fileno=fds[0])
        generation = self.generations.get(message["generation"])
        if generation is None:  # it was given up meanwhile
            return link.close()
        page = self._book.pages()[message["page"]] if self._book else None
        generation.workers.attach(message["slot"], message["epoch"], message["pid"], link, page)

    def _pool(self, message: dict[str, Any], fds: list[int]) -> None:
        if not fds:
            _log.error("the link to the KV pool was lost on its way; raise the limit of open files")
            return
        self.generations.pool(message["pool"]).attach(socket.socket(fileno=fds[0]))

    def _dead(self, message: dict[str, Any], _: list[int]) -> None:
        worker = message["slot"], message["epoch"]
        self._doomed_workers.discard(worker)
        self.requests.moves.dead(worker, Death(message["cause"], frozenset(message["keys"])))

    def _doomed(self, message: dict[str, Any], _: list[int]) -> None:
        self._doomed_workers.add((message["slot"], message["epoch"]))

    def _generation(self, message: dict[str, Any], _: list[int]) -> None:
        settings = Settings.from_json(message["settings"])
        self.generations.add(message["generation"], message["pool"], settings, ModelFacts.from_wire(message["facts"]))

    def _serve(self, message: dict[str, Any], _: list[int]) -> None:
        """New requests go to this generation; those of older ones move to it or end where they are."""
        former, serving = self.generations.serving, self.generations.get(message["generation"])
        if serving is None:
            return _log.error("a generation is not known", generation=message["generation"])
        self.generations.serving = serving
        _log.info("another generation serves", generation=serving.number, model=serving.facts.name,
                  id=serving.facts.id, same_pool=serving.pool is former.pool)
        self.requests.moves.take_over(serving)
        self.server.serve_another()
        self._wake(0)

    def _forget(self, message: dict[str, Any], _: list[int]) -> None:
        """It is empty or never served; or it cannot work any more, and then neither can what it was to serve."""
        generation = self.generations.get(message["generation"])
        if generation is not None and generation is not self.generations.serving:
            self.requests.moves.give_up(generation)
            self.generations.forget(generation.number)
            self.requests.forget(generation.pool)

    def _distrust(self, worker: Worker) -> None:
        self._control.say("kill", kind="worker", slot=worker.slot, epoch=worker.epoch,
                          reason="it broke the link's protocol")

    def _ended(self, worker: Worker) -> None:
        """The worker's main thread has ended. If that was by SIGKILL, and not the supervisor's, all is known of its
        death that anybody needs, and the rest of what it said is on the link; else "dead" will say more."""
        self._control.read_all()  # the supervisor speaks before it signals
        page, generation = worker.page, self.generations.of(worker)
        if page is None or generation is None or worker.id in self._doomed_workers:
            return
        death = Death("killed", frozenset(page.running_keys()))
        if process.exit_status(worker.pid) != -signal.SIGKILL:  # or reaped, and the page may be another's
            return
        generation.pool.killed(worker.id)
        self.requests.moves.killed(worker.id, death)
        worker.hear_out()

    def _state(self, message: dict[str, Any], _: list[int]) -> None:
        self.health.update({name: value for name, value in message.items() if name != "t"})
        if self.generations.heed({worker.get("pid"): worker["up"] for worker in message.get("workers", ())}):
            self.requests.pump()

    def _answer(self, message: dict[str, Any], _: list[int]) -> None:
        self.admin.answered(message)

    def _log_level(self, message: dict[str, Any], _: list[int]) -> None:
        log.set_level(message["level"])

    def _drain(self, message: dict[str, Any], _: list[int]) -> None:
        self._begin_drain(message["seconds"])
        self._wake(0)

    def _retire(self, _: dict[str, Any], __: list[int]) -> None:
        """Another dispatcher accepts now. What is live here ends here."""
        self.server.stop_accepting()
        self.admin.stop_accepting()
        self._begin_drain(RETIRED_SECONDS)
        self._wake(0)

    def _orphaned(self) -> None:
        _log.error("the supervisor is gone")
        self._finish(Exit.INTERNAL)

    # ---- an administrator's ----------------------------------------------------------------------------------------

    def _drain_by_hand(self) -> None:
        """As when the daemon stops, but it stays. Nothing new if it is draining already."""
        if not self.requests.draining:
            self._begin_drain(self.server.settings.drain_seconds)
            self._by_hand, self.health.draining = True, DRAINED_BY_HAND
            self._wake(0)

    def _resume(self) -> bool:
        if self._by_hand:
            self.requests.draining, self.health.draining = False, ""
            self._drain_at, self._by_hand = float("inf"), False
        return not self.requests.draining

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
        self._gauges.close()
        self.server.close()
        self.admin.close()
        self.requests.moves.close()
        self.generations.close()
        self._control.close()

    def _begin_drain(self, seconds: float) -> None:
        """No new requests; live ones may go on for so long."""
        self.requests.draining, self.health.draining, self._by_hand = True, "the daemon is stopping", False
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
            busy = self.requests.live or self.requests.draining or not self.server.idle or self._emptying()
            self._wake(BUSY_TICK_SECONDS if busy else IDLE_TICK_SECONDS)

    def _look_around(self, now: float) -> None:
        page = self._page
        page[Field.PROGRESS] += 1
        page[Field.BUSY] = self.requests.running
        page[Field.BEAT_NS] = time.monotonic_ns()
        self.server.tick(now)
        self.admin.tick(now)
        self.requests.tick(now, now - self._pause_seconds)
        self._tell_empty()
        self._go_on_stopping(now)

    def _emptying(self) -> list[Generation]:
        serving = self.generations.serving.number
        return [g for g in self.generations if g.number < serving and g.number not in self._told_empty]

    def _tell_empty(self) -> None:
        for generation in self._emptying():
            if generation.empty:
                self._told_empty.add(generation.number)
                self._control.say("empty", generation=generation.number)

    def _go_on_stopping(self, now: float) -> None:
        if now >= self._drain_at:
            self._drain_at = float("inf")
            self.requests.end_all()
        if self.requests.draining and not (self._by_hand or self.requests.live or self._told_drained):
            self._told_drained = True
            self._control.say("drained")
        if now >= self._stop_at or self._stop_at != float("inf") and self.server.idle and self.admin.idle:
            self._finish(Exit.STOPPED)


def draw_seed() -> int:
    return int.from_bytes(os.urandom(8), "little")


def run(listener: socket.socket, admin: socket.socket, control: socket.socket, page: Page, settings: Settings,
        facts: ModelFacts, generation: int = 1, pool: int = 1, book: Book | None = None) -> int:  # fmt: skip
    """The life of the process; its exit code. listener, admin: bound and listening. generation, pool: the numbers of
    those that serve at its birth. page: this process writes it. book: everybody's pages."""
    allow_open_files()
    loop = uvloop.new_event_loop()
    loop.set_exception_handler(_report)
    dispatcher = Dispatcher(loop, listener, admin, control, page, settings, facts, numbers=(generation, pool),
                            book=book)
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
