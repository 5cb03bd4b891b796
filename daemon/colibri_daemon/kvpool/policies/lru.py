"""Least recently used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import Entry, Priority


def lru(entry: Entry, now: float) -> Priority:
    return entry.last_use, -entry.ordinal
