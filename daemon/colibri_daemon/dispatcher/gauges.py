"""What is going on now, shown in this process's page: soon after anything happens, and not again while nothing does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from .generation import Generations
from .requests import Requests
from .session import Session
from .stats import Stats

SHOW_SECONDS = 0.02  # from the first thing that happens: what is shown is never older


class Gauges:
    """sessions: the open connections."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stats: Stats, requests: Requests, generations: Generations,
                 sessions: Callable[[], Iterable[Session]]) -> None:
        self._loop, self._stats = loop, stats
        self._requests, self._generations, self._sessions = requests, generations, sessions
        self._timer: asyncio.TimerHandle | None = None

    def stir(self) -> None:
        """Something has come in or is to go out."""
        if self._timer is None:
            self._timer = self._loop.call_later(SHOW_SECONDS, self.show)

    def show(self) -> None:
        self.close()
        requests, sessions = self._requests, list(self._sessions())
        paused = sum(session.pausing for session in sessions)
        show = self._stats.set
        show("num_requests_running", requests.running)
        show("num_requests_waiting", requests.waiting)
        show("waiting_tokens", requests.waiting_tokens)
        show("stall_bound_seconds", max((worker.stall_ms / 1000 for worker in self._generations.workers()), default=0))
        show("connections", len(sessions) - paused, state="active")
        show("connections", paused, state="paused")
        show("output_buffer_bytes", sum(session.channel.buffered for session in sessions))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
