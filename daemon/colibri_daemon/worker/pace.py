"""How much prefill a step may have, so that it adds no more to the step than was promised. Pure.

What a row of it takes was measured at the start, perhaps on a quieter machine, and at other depths. So it is followed:
mean and mean deviation of seconds per row, as TCP follows round-trip times (Jacobson and Karels, Congestion Avoidance
and Control, 1988). A chunk is as long as the bound holds with some deviations to spare: near the bound on a quiet
machine, shorter where steps of the same size differ.
"""

from __future__ import annotations

MEAN_GAIN, DEVIATION_GAIN = 1 / 8, 1 / 4  # Jacobson's
SPARE = 4.0  # deviations, as there
FULL = 0.5  # of what it may have: shorter steps say little of longer ones, they cost more per row


class Pace:
    """most, least: rows of prefill in a step, most of them expected to take the whole bound. bound: seconds that they
    should add to it at most; infinite if nobody minds."""

    def __init__(self, most: int, least: int, bound: float) -> None:
        self._most, self._least, self._bound = most, least, bound
        self._mean, self._deviation = bound / most, 0.0  # seconds per row
        self.rows = float(most)

    def took(self, rows: float, seconds: float) -> None:
        """So many rows added so much to a step."""
        if self._bound == float("inf") or (rows < FULL * self.rows and seconds <= self._bound):
            return
        error = seconds / max(rows, self._least) - self._mean
        self._mean += MEAN_GAIN * error
        self._deviation += DEVIATION_GAIN * (abs(error) - self._deviation)
        self.rows = min(self._most, max(self._least, self._bound / (self._mean + SPARE * self._deviation)))
