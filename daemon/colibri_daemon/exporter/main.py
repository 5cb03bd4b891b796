"""The metrics process from start to end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from typing import Any

from ..common import ipc, log
from ..common.exit_codes import Exit
from ..common.facts import ModelFacts
from ..common.pages import Book, Field, Page, State
from ..common.settings import Settings
from .experts import SAMPLE_SECONDS, Imbalance
from .exposition import CONTENT_TYPE
from .http import Answer, HttpServer
from .scrape import Scrape, Service
from .urgency import Urgency

TICK_SECONDS = 0.5
_log = log.get("metrics")


class Exporter:
    """finished: set to the exit code."""

    def __init__(self, loop: asyncio.AbstractEventLoop, control: socket.socket, page: Page, book: Book,
                 supervisor: int) -> None:
        self.finished: asyncio.Future[int] = loop.create_future()
        self._informed = asyncio.Event()  # of what there is; before, series would be missing
        self._loop, self._control, self._page = loop, control, page
        self.service, self._imbalance = Service(time.monotonic), Imbalance(book)
        self._scrape = Scrape(book, self.service, self._imbalance, supervisor)
        self.http = HttpServer({"/metrics": self._metrics, "/health/live": self._live, "/health/ready": self._ready})
        self._sample_due = 0.0
        control.setblocking(False)
        loop.add_reader(control.fileno(), self._hear)
        self._timer = loop.call_soon(self._tick)

    async def serve(self, listener: socket.socket) -> int:
        """Until finished; the exit code. Whoever connects too early waits in the listener's queue."""
        await self._informed.wait()
        server = await self._loop.create_server(self.http.connection, sock=listener)
        self._page[Field.STATE] = State.READY
        ipc.send_control(self._control, {"t": "ready"})
        try:
            return await self.finished
        finally:
            self._page[Field.STATE] = State.STOPPING
            server.close()

    def stop(self) -> None:
        self._finish(Exit.STOPPED)

    def close(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._control.fileno())
        self._control.close()

    def _finish(self, code: Exit) -> None:
        if not self.finished.done():
            self.finished.set_result(int(code))
        self._informed.set()

    # ---- what is asked ----

    def _metrics(self) -> Answer:
        return Answer(200, self._scrape.text(), CONTENT_TYPE)

    def _live(self) -> Answer:
        """The supervisor speaks, whatever it says."""
        return Answer(200, b"live\n") if self.service.known else Answer(503, b"the supervisor says nothing\n")

    def _ready(self) -> Answer:
        if self.service.ready:
            return Answer(200, b"ready\n")
        return Answer(503, f"not ready: {self.service.reason}\n".encode())

    # ---- the supervisor ----

    def _hear(self) -> None:
        try:
            while (packet := ipc.receive_control(self._control)) is not None:
                self._obey(*packet)
            self._finish(Exit.STOPPED)
        except BlockingIOError:
            return
        except (OSError, ValueError):  # it ended with messages of ours unread, or it is not our supervisor
            self._finish(Exit.STOPPED)

    def _obey(self, message: dict[str, Any], fds: list[int]) -> None:
        match message:
            case {"t": "state"}:
                self.service.update(message)
                self._informed.set()
            case {"t": "log_level", "level": level}:
                log.set_level(level)
        for fd in fds:
            os.close(fd)

    # ---- time ----

    def _tick(self) -> None:
        now = time.monotonic()
        self._page[Field.PROGRESS] += 1
        self._page[Field.BEAT_NS] = time.monotonic_ns()
        if now >= self._sample_due and (model := self.service.about.get("id")):
            self._imbalance.sample(now, model)
            self._sample_due = now + SAMPLE_SECONDS
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)


def run(listener: socket.socket, control: socket.socket, page: Page, settings: Settings, facts: ModelFacts | None,
        book: Book) -> int:  # fmt: skip
    """The process's exit code. listener: bound and listening; page: this process's own; book: everybody's. It starts
    before a model is known."""
    loop = asyncio.new_event_loop()
    exporter = Exporter(loop, control, page, book, os.getppid())
    loop.add_signal_handler(signal.SIGTERM, exporter.stop)
    urgency = Urgency(loop)
    try:
        return loop.run_until_complete(exporter.serve(listener))
    finally:
        exporter.close()
        urgency.end()
        loop.close()
