"""Pages of shared memory, one per process, made by the supervisor before it forks. A page has three parts: the progress
that the supervisor judges by, counters for metrics (counters.py), and the tokens of each expert of the model.

Each page has one writer, its process; others only read. A write is one aligned 64-bit store, so a reader sees either
the old or the new value. The engine itself bumps PROGRESS and the experts' tokens from inside a step.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from enum import IntEnum

PAGE = mmap.PAGESIZE  # bytes of progress
COUNTERS_BYTES = 60 << 10
EXPERTS_BYTES = 192 << 10
ENTRY = PAGE + COUNTERS_BYTES + EXPERTS_BYTES  # of all three; memory that nobody has touched takes no room
COUNTERS_HEADER = 64
MAX_KEYS = 64
MOST_PAGES = 2048  # in a book: several generations of 256 workers and their supervisor's notes


class Field(IntEnum):
    """Index of each unsigned 64-bit value of the progress."""

    PROGRESS = 0  # grows while work is done: engine steps in a worker, loop turns elsewhere
    STATE = 1  # State
    BUSY = 2  # running requests
    STEPS = 3  # completed engine steps
    BEAT_NS = 4  # monotonic time of the last loop turn; at least every 0.5 s but in an engine step
    LOADED = 5  # bytes of weights mapped or checked so far
    TO_LOAD = 6
    SLABS = 7
    FREE_SLABS = 8
    LIFE = 9  # half of it; see life.py. The kernel writes it for the process when that ends
    KEYS = 16  # ids of the requests in the running step, 0-terminated, at most MAX_KEYS


class Head(IntEnum):
    """Index of each unsigned 64-bit value in front of the counters. SOURCE and SLOT are written by a Book."""

    SOURCE = 0  # metrics.Source; 0: nobody was ever given this page
    SLOT = 1
    DIGEST = 2  # of the declaration that the numbers are laid out by
    GAUGES = 3  # how many numbers are gauges; they come first
    MODEL = 4  # whose experts' tokens are counted: a digest of its id
    LAYERS = 5
    EXPERTS = 6


class State(IntEnum):
    STARTING = 0
    LOADING = 1
    READY = 2
    STOPPING = 3


class Page:
    """One process's page: page[Field.STEPS] reads, page[Field.STEPS] = n writes. place: descriptor and index of the
    page in the memory it is part of, for a process that does not inherit the mapping."""

    def __init__(self, memory: memoryview, place: tuple[int, int]) -> None:
        """memory: ENTRY bytes."""
        self.memory, self.place = memory[:PAGE], place
        self.counters = memory[PAGE : PAGE + COUNTERS_BYTES]
        self.experts = memory[PAGE + COUNTERS_BYTES :]
        self.head = self.counters[:COUNTERS_HEADER].cast("Q")
        self._words = self.memory.cast("Q")

    @classmethod
    def open(cls, fd: int, index: int) -> Page:
        """In another process, which may close the descriptor then."""
        return cls(memoryview(mmap.mmap(fd, ENTRY, offset=index * ENTRY)), (fd, index))

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value

    def running_keys(self) -> list[int]:
        """The requests in the step that runs, or that was running when the process ended; until the page is cleared."""
        keys = [self[Field.KEYS + i] for i in range(MAX_KEYS)]
        return keys[: keys.index(0)] if 0 in keys else keys

    def clear(self) -> None:
        """The progress. By the supervisor alone, while the slot has no process; so is what follows."""
        self.memory[:] = bytes(PAGE)

    def clear_gauges(self) -> None:
        size = 8 * self.head[Head.GAUGES]
        self.counters[COUNTERS_HEADER : COUNTERS_HEADER + size] = bytes(size)


class Book:
    """The pages of all processes of a service, in one memory that grows as they are taken. A page that was given back
    is taken by the next process of the same source and slot, so there are never more than lived at one time."""

    def __init__(self, fd: int, most: int = MOST_PAGES) -> None:
        self.fd, self._most = fd, most
        self._memory = memoryview(mmap.mmap(fd, most * ENTRY))
        self._pages: list[Page] = []
        self._taken: set[int] = set()

    @classmethod
    def make(cls, most: int = MOST_PAGES) -> Book:
        """The descriptor lives as long as the process."""
        fd = os.memfd_create("colibri-book", os.MFD_CLOEXEC)
        os.ftruncate(fd, most * ENTRY)
        return cls(fd, most)

    def take(self, source: int, slot: int = 0) -> Page:
        """For a process that nobody else writes for. OSError if the book is full."""
        for index, page in enumerate(self.pages()):
            if index not in self._taken and (page.head[Head.SOURCE], page.head[Head.SLOT]) == (source, slot):
                break
        else:
            page = self._page(index := len(self._pages))
            page.head[Head.SLOT], page.head[Head.SOURCE] = slot, source
        self._taken.add(index)
        return page

    def give_back(self, page: Page) -> None:
        """Its process is gone for good."""
        page.clear()
        page.clear_gauges()
        self._taken.discard(page.place[1])

    def pages(self) -> list[Page]:
        """Those that were ever taken. A page once listed stays at its place."""
        while len(self._pages) < self._most:
            page = self._page(len(self._pages))
            if not page.head[Head.SOURCE]:
                break
            self._pages.append(page)
        return self._pages

    def _page(self, index: int) -> Page:
        if index >= self._most:
            raise OSError(errno.ENOMEM, f"all {self._most} pages of shared memory are taken")
        return Page(self._memory[index * ENTRY : (index + 1) * ENTRY], (self.fd, index))


def make_pages(count: int) -> list[Page]:
    """Shared pages. Forked children inherit them; the descriptor lives as long as any of them."""
    fd = os.memfd_create("colibri-pages", os.MFD_CLOEXEC)
    os.ftruncate(fd, count * ENTRY)
    mapped = mmap.mmap(fd, count * ENTRY)
    weakref.finalize(mapped, os.close, fd).atexit = False  # a child's descriptor of this number may be another
    memory = memoryview(mapped)
    return [Page(memory[i * ENTRY : (i + 1) * ENTRY], (fd, i)) for i in range(count)]
