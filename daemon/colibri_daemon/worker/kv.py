"""Where a worker's KV slabs come from: the interface, and the arena of this worker alone behind it.

A worker attaches a sequence (which may find a prefix computed before), takes slabs ahead of the tokens that need them,
commits how far it has computed, and releases. Slabs are arena indices; a sequence is known by its request's key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from colibri_engine.sequence import Attention, KvArena

from ..common.kv import out_of_view


class Kv(Protocol):
    """total and free count slabs. Nothing here waits: what is not free is not given."""

    arena: KvArena
    total: int

    @property
    def free(self) -> int: ...

    def attach(self, key: int, tokens: np.ndarray, attention: Attention) -> list[int]:
        """Opens a sequence. Returns the slabs of the longest known prefix of tokens, all full, possibly none; the
        sequence goes on behind them."""

    def take(self, key: int, count: int) -> list[int]:
        """Slabs for the sequence's next positions; count must be free."""

    def commit(self, key: int, position: int) -> list[int]:
        """The first ``position`` tokens are computed and what followed from them is sent. Returns the indices in the
        sequence's slab table that no later query sees; those slabs are given back."""

    def release(self, key: int) -> None:
        """Ends the sequence; every slab it still has is given back."""


@dataclass(slots=True)
class _Held:
    """A sequence's slabs by index in its table. Indices below ``end`` were given, those before ``seen_to`` and behind
    the pinned prefix taken back."""

    attention: Attention
    slabs: dict[int, int] = field(default_factory=dict)
    end: int = 0
    seen_to: int = 0


class LocalKv:
    """Kv of one worker by itself: no prefixes, an arena that ends with the process."""

    def __init__(self, arena: KvArena, slab_tokens: int) -> None:
        self.arena, self.total, self._slab_tokens = arena, arena.free, slab_tokens
        self._sequences: dict[int, _Held] = {}

    @property
    def free(self) -> int:
        return self.arena.free

    def attach(self, key: int, tokens: np.ndarray, attention: Attention) -> list[int]:
        self._sequences[key] = _Held(attention)
        return []

    def take(self, key: int, count: int) -> list[int]:
        held, slabs = self._sequences[key], self.arena.take(count)
        held.slabs.update(enumerate(slabs, held.end))
        held.end += count
        return slabs

    def commit(self, key: int, position: int) -> list[int]:
        held = self._sequences[key]
        hidden = out_of_view(position, held.attention.pinned, held.attention.window, self._slab_tokens)
        gone = list(range(max(hidden.start, held.seen_to), hidden.stop))
        held.seen_to = max(held.seen_to, hidden.stop)
        for index in gone:
            self.arena.give(held.slabs.pop(index))
        return gone

    def release(self, key: int) -> None:
        for slab in self._sequences.pop(key).slabs.values():
            self.arena.give(slab)
