"""Progress pages: one page of shared memory per process, made by the supervisor before it forks.

Each page has one writer, its process; the supervisor only reads. A write is one aligned 64-bit store, so a reader sees
either the old or the new value. The engine itself bumps PROGRESS from inside a step (colibri_config_t.progress).
"""

from __future__ import annotations

import mmap
from enum import IntEnum

PAGE = mmap.PAGESIZE
MAX_KEYS = 64


class Field(IntEnum):
    """Index of each unsigned 64-bit value in a page."""

    PROGRESS = 0  # grows while work is done: engine steps in a worker, loop turns elsewhere
    STATE = 1  # State
    BUSY = 2  # running requests
    STEPS = 3  # completed engine steps
    BEAT_NS = 4  # monotonic time of the last loop turn
    LOADED = 5  # bytes of weights mapped or checked so far
    TO_LOAD = 6
    SLABS = 7
    FREE_SLABS = 8
    KEYS = 16  # ids of the requests in the running step, 0-terminated, at most MAX_KEYS


class State(IntEnum):
    STARTING = 0
    LOADING = 1
    READY = 2
    STOPPING = 3


class Page:
    """One process's page: page[Field.STEPS] reads, page[Field.STEPS] = n writes."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory  # PAGE bytes
        self._words = memory.cast("Q")

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value

    def clear(self) -> None:
        """By the supervisor alone, while the slot has no process."""
        self.memory[:] = bytes(PAGE)


def make_pages(count: int) -> list[Page]:
    """Anonymous shared pages, inherited by children."""
    memory = memoryview(mmap.mmap(-1, count * PAGE))
    return [Page(memory[i * PAGE : (i + 1) * PAGE]) for i in range(count)]
