"""What is going on now, shown soon after anything happens, and not again while nothing does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SHOW_SECONDS = 0.02  # from the first thing that happens: what is shown is never older


class Gauges:
    """show() sets them all."""

    def __init__(self, loop: asyncio.AbstractEventLoop, show: Callable[[], None]) -> None:
        self._loop, self._show = loop, show
        self._timer: asyncio.TimerHandle | None = None

    def stir(self) -> None:
        """Something has come in or is to go out."""
        if self._timer is None:
            self._timer = self._loop.call_later(SHOW_SECONDS, self._shown)

    def _shown(self) -> None:
        self._timer = None
        self._show()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
