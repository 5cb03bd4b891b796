"""When a refused client may come back: from how fast the queue drains. Pure; clocks are passed in."""

from __future__ import annotations

import math

RATE_SECONDS, RATE_LEAST_SECONDS = 5.0, 0.1  # memory of the drain rate; below this it is not known yet
RETRY_LEAST_MS, RETRY_MOST_MS, RETRY_UNKNOWN_MS = 50, 600_000, 1000
MARGIN = 1.2  # on the time between two returns: the rate may have been too hopeful
SLACK = 0.5  # of the queue that is to be empty by the first return: they do not come as evenly as that


class DrainRate:
    """Exponentially fading average of requests and tokens per second, over the time in which someone waits."""

    def __init__(self, now: float) -> None:
        self._requests, self._tokens, self._seconds, self._at = 0.0, 0.0, 0.0, now

    def skip(self, now: float) -> None:
        """Nobody waited until now."""
        self._at = now

    def add(self, tokens: int, now: float) -> None:
        """A request went to a worker while others waited."""
        self._fade(now)
        self._requests += 1
        self._tokens += tokens

    def seconds_for(self, tokens: int, now: float) -> float | None:
        """How long until there is room for one more request of this size; None if not known."""
        self._fade(now)
        if self._seconds < RATE_LEAST_SECONDS or not self._requests:
            return None
        return max(1 / self._requests, tokens / max(1.0, self._tokens)) * self._seconds

    def _fade(self, now: float) -> None:
        keep = math.exp(-(now - self._at) / RATE_SECONDS)
        self._requests, self._tokens = self._requests * keep, self._tokens * keep
        self._seconds = self._seconds * keep + RATE_SECONDS * (1 - keep)
        self._at = now


class Returns:
    """The times that refused clients were given. Each gets one of its own, as if all would come."""

    def __init__(self, now: float) -> None:
        self.rate = DrainRate(now)
        self.rows_per_second = 0.0  # that the workers say they can compute; taken while the rate is not known
        self._promised = now  # to the one who was refused last

    def after(self, tokens: int, length: int, waiting: int, now: float) -> int:
        """Milliseconds until there will be room for a request of so many tokens to begin with, and of this length at
        most when it ends, while so many wait."""
        interval = self.rate.seconds_for(tokens, now)
        if interval is None:
            if not self.rows_per_second or not length:
                return RETRY_UNKNOWN_MS
            interval = length / self.rows_per_second
        earliest = max(self._promised, now + SLACK * waiting * interval)
        self._promised = min(earliest + MARGIN * interval, now + RETRY_MOST_MS / 1000)
        return min(max(RETRY_LEAST_MS, math.ceil((self._promised - now) * 1000)), RETRY_MOST_MS)
