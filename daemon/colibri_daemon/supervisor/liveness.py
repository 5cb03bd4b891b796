"""Is a child that should be making progress making any? Judged by counters in its page, never by asking it: a busy
process cannot answer, a stuck one must not be believed."""

from __future__ import annotations

LONGEST_GAP = 1.0  # seconds


class Watch:
    """How long a counter has stood still.

    Only time in which the watcher itself was running counts: after the whole machine or process group was stopped for a
    minute, nobody is judged by that minute.
    """

    def __init__(self, now: float) -> None:
        self._seen = self._moved = now
        self._counter: object = None

    def look(self, now: float, counter: object) -> float:
        """Records a reading; returns for how many seconds the counter has stood still."""
        unwatched = max(0.0, now - self._seen - LONGEST_GAP)
        self._seen = now
        self._moved = min(now, self._moved + unwatched)
        if counter != self._counter:
            self._counter, self._moved = counter, now
        return now - self._moved
