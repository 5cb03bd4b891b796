"""Who notices that a worker is being killed, before its link ends: a thread for each worker that sleeps in the kernel.

common/life.py has what it waits for. The loop, which cannot wait for that, is told by call_soon_threadsafe().
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from ..common import life
from ..common.pages import Page
from .workers import Worker


class Watch:
    """ended(worker) is called in the loop when the worker's main thread has ended, of whatever cause, if that can be
    told. A thread lives as long as its worker, and does not keep this process from ending."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ended: Callable[[Worker], None]) -> None:
        self._loop, self._ended = loop, ended

    def begin(self, worker: Worker) -> None:
        """Once it has loaded, and so has armed its page if it can."""
        if worker.page is not None:
            threading.Thread(target=self._wait, args=(worker, worker.page), daemon=True, name="watch").start()

    def _wait(self, worker: Worker, page: Page) -> None:
        if life.wait(page, worker.pid):
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ended, worker)
