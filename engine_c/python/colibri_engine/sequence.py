"""KV slabs in memory; and a sequence's slab table with the arena it draws from, for the engine's own use (the daemon's
pool is a process)."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._colibri import ffi, lib
from .binding import Buffer, pointer
from .errors import EngineError


@dataclass(frozen=True)
class Attention:
    """A query at t sees [0, pinned) and (t - window, t]; window 0 = everything. positions: colibri_positions_t."""

    pinned: int
    window: int
    positions: int


class KvMemory:
    """Slabs of one geometry by index; who may write which is the caller's to know. memory: a mapping that other
    processes may share, by default our own."""

    def __init__(self, info: Any, slabs: int, memory: mmap.mmap | None = None) -> None:
        self.slabs, self._slab_bytes = slabs, info.slab_bytes
        self.buffer = Buffer(lib.COLIBRI_KV_CACHE, slabs * info.slab_bytes, memory)

    def slab(self, index: int) -> memoryview:
        """Its contents."""
        return self.buffer.view(index * self._slab_bytes, (index + 1) * self._slab_bytes)


class KvArena(KvMemory):
    """With a free list, in ascending order."""

    def __init__(self, info: Any, slabs: int) -> None:
        super().__init__(info, slabs)
        self._free = list(range(slabs - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """All of them or, with EngineError, none."""
        if count > len(self._free):
            raise EngineError(lib.COLIBRI_KV_SLAB,
                              f"the KV arena has {len(self._free)} free slabs, {count} are needed; open a larger one")
        return [self._free.pop() for _ in range(count)]

    def give(self, slab: int) -> None:
        self._free.append(slab)


class Sequence:
    """Position and slab table of one text. Slabs that no later query can see go back to the arena."""

    def __init__(self, attention: Attention, slab_tokens: int, id: int = 0) -> None:
        """``id`` is what callbacks are told."""
        self.attention, self.position, self.id = attention, 0, id
        self._slab_tokens = slab_tokens
        self._table = np.empty(0, dtype=np.uint32)
        self._released = 0

    def slabs_needed(self, length: int, chunk: int) -> int:
        """Slabs that a text of ``length`` tokens holds at most, processed in chunks."""
        whole = -(-length // self._slab_tokens)
        if not self.attention.window:
            return whole
        visible = self.attention.pinned + self.attention.window + chunk
        return min(whole, -(-visible // self._slab_tokens) + 3)

    def reserve(self, arena: KvArena, tokens: int) -> None:
        need = -(-(self.position + tokens) // self._slab_tokens)
        if need > len(self._table):
            fresh = arena.take(need - len(self._table))
            self._table = np.concatenate([self._table, np.array(fresh, dtype=np.uint32)])

    def describe(self, entry: Any, tokens: np.ndarray, wanted: int) -> None:
        """Fills a colibri_sequence_t; the arrays must outlive the call that reads it."""
        entry.struct_size = ffi.sizeof("colibri_sequence_t")
        entry.id = self.id
        entry.n_tokens, entry.tokens = len(tokens), pointer(tokens, "uint32_t")
        entry.position, entry.logits_from = self.position, wanted
        entry.pinned, entry.window = self.attention.pinned, self.attention.window
        entry.positions = self.attention.positions
        entry.slabs, entry.n_slabs = pointer(self._table, "uint32_t"), len(self._table)

    def advance(self, arena: KvArena, tokens: int) -> None:
        self.position += tokens
        if self.attention.window:
            self._release(arena)

    def _release(self, arena: KvArena) -> None:
        """Slabs wholly between the pinned prefix and the window of the next query."""
        first = max(self._released, -(-self.attention.pinned // self._slab_tokens))
        last = (self.position + 1 - self.attention.window) // self._slab_tokens
        for index in range(first, last):
            self.give_back(arena, index)
        self._released = max(first, last)

    def give_back(self, arena: KvArena, index: int) -> None:
        """Returns the slab of positions [index * slab_tokens, (index + 1) * slab_tokens), which no layer sees any more:
        those an eviction callback hides from all of them. Idempotent."""
        if self._table[index] != lib.COLIBRI_NO_SLAB:
            arena.give(int(self._table[index]))
            self._table[index] = lib.COLIBRI_NO_SLAB

    def close(self, arena: KvArena) -> None:
        """Gives every slab back."""
        for slab in self._table:
            if slab != lib.COLIBRI_NO_SLAB:
                arena.give(int(slab))
        self._table = self._table[:0]
