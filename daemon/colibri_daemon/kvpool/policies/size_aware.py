"""Short prefixes live longer: least recently used, where a slab counts as older the more of its sequence comes before.

A system prompt is short and shared by many; the far end of a long document helps only its own repetition, and is the
first to go. One long sequence then cannot sweep many short ones out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import Entry, Priority

SECONDS_PER_SLAB = 10.0


def size_aware(entry: Entry, now: float) -> Priority:
    return entry.last_use - SECONDS_PER_SLAB * entry.ordinal, -entry.ordinal
