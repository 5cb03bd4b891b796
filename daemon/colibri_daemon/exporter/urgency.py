"""Whoever asks the metrics process waits for microseconds of work, among engine threads that compute for milliseconds.
The kernel's fair scheduler lets it wait for its next tick, 4 ms at 250 Hz, in one of six cases, and takes the core away
from half made answers, whatever the nice values. So it runs under real-time scheduling where it may, but not without
end: who asks without a pause gets the fair share of everybody.
"""

from __future__ import annotations

import asyncio
import signal

from ..common import log, process

BURST_SECONDS = 0.2  # of computing without a pause: dozens of scrapes
TURNS_SECONDS = 10.0  # that it takes turns after that
_log = log.get("metrics")


class Urgency:
    """Of the loop's thread, from now until end(), which comes before the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, burst: float = BURST_SECONDS,
                 turns: float = TURNS_SECONDS) -> None:
        self._loop, self._burst, self._turns = loop, burst, turns
        loop.add_signal_handler(signal.SIGXCPU, self._take_turns)
        self._go_first()

    def end(self) -> None:
        process.take_turns()

    def _go_first(self) -> None:
        process.go_first(self._burst)

    def _take_turns(self) -> None:
        process.take_turns()
        _log.warning("asked without a pause: answers take turns with computing", seconds=self._turns)
        self._loop.call_later(self._turns, self._go_first)
