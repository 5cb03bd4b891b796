"""How much prefill a step may have: less while it takes longer than was promised. Pure.

The budget was measured at the start, perhaps on a quieter machine, and at other depths. What prefill really takes
corrects it: too long a chunk cuts the next one at once, full ones that keep the bound win it back a tenth at a time.
"""

from __future__ import annotations

CUT_MOST = 0.5  # by one step: it may have been an accident
REGAIN = 1.1  # a step
FULL = 0.9  # of what it may have: a step that says something about a larger one
AIM = 0.8  # of the bound: steps of the same size differ


class Pace:
    """most, least: rows of prefill in a step. bound: seconds that they should add to it at most."""

    def __init__(self, most: int, least: int, bound: float) -> None:
        self.most, self._least, self._aim = most, least, AIM * bound
        self.rows = float(most)

    def took(self, rows: float, seconds: float) -> None:
        """So many rows added so much to a step."""
        if seconds > self._aim and rows > self._least:
            self.rows = max(self._least, min(self.rows, rows * max(CUT_MOST, self._aim / seconds)))
        elif seconds <= self._aim and rows >= FULL * self.rows:
            self.rows = min(self.most, self.rows * REGAIN)
