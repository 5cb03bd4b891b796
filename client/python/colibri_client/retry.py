"""When to try again: pure functions of what has happened, clocks and chance passed in."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from colibri_protocol.errors import Code

from .errors import RequestError


@dataclass(frozen=True)
class Policy:
    """``retries``: at most so many attempts after the first, for errors that the server calls retryable.
    ``reconnect``: seconds that a lost connection may take to come back, while no token arrives.
    ``base`` and ``most``: seconds of the back-off, which doubles from one to the other."""

    retries: int = 3
    reconnect: float = 10.0
    base: float = 0.1
    most: float = 5.0
    chance: Callable[[], float] = random.random  # in [0, 1)

    def delay(self, attempt: int, retry_after: float | None = None) -> float:
        """Seconds to wait before attempt 1, 2, ...: never less than retry_after; jitter keeps clients apart."""
        backoff = min(self.most, self.base * 2.0 ** min(attempt - 1, 30))
        return (retry_after or 0.0) + backoff * (0.5 + 0.5 * self.chance())

    def again(self, error: RequestError, attempt: int) -> float | None:
        """Seconds until attempt (1, 2, ...) after this error, or None: it is final.

        DRAINING is retried although this daemon will not take the request: the next connection may reach another."""
        if attempt > self.retries or not (error.retryable or error.code == Code.DRAINING):
            return None
        return self.delay(attempt, error.retry_after)

    def reconnect_after(self, losses: int, lost_for: float) -> float | None:
        """Seconds until connecting again after so many losses in a row, the first of them lost_for seconds ago; None:
        give up. The first is at once: a daemon that is replaced is there already."""
        if self.reconnect <= 0 or lost_for > self.reconnect:
            return None
        return 0.0 if losses <= 1 else min(self.delay(losses - 1), max(self.reconnect - lost_for, 0.0))
