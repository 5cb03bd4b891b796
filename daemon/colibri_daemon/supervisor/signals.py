"""Signals as something to wait for: the handlers only record, the loop acts when it is its turn."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from types import FrameType, TracebackType


class Recorder:
    """While entered, these signals are recorded: fd is readable when there is one, taken() gives them in order."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._numbers = frozenset(numbers)

    def __enter__(self) -> Recorder:
        self.fd, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in self._numbers:
            signal.signal(number, _recorded)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would hide exit codes from us
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self.fd)
        os.close(self._writing)

    def taken(self) -> list[signal.Signals]:
        try:
            return [signal.Signals(number) for number in os.read(self.fd, 256) if number in self._numbers]
        except BlockingIOError:
            return []


def _recorded(number: int, frame: FrameType | None) -> None:
    """The interpreter has written the number into the wake-up descriptor, but only for signals with a handler."""
