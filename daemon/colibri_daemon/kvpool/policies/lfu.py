"""Least frequently used, with ageing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import Entry, Priority

HALF_LIFE_SECONDS = 300.0  # after which a use counts half


def lfu(entry: Entry, now: float) -> Priority:
    """Orders by uses * 2 ** (-(age) / half-life); its logarithm at any time differs from this by a constant."""
    return entry.last_use + HALF_LIFE_SECONDS * math.log2(max(1, entry.uses)), -entry.ordinal
