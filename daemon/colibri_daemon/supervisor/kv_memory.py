"""The memory of the KV cache: made once, before the first child, and kept while processes come and go.

The arena holds keys and values; the journal what the pool must know of them when it starts again. The supervisor writes
neither.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..common import log, memory
from ..common.arena import Arena, choose_slabs
from ..common.facts import ModelFacts
from ..common.settings import Settings


@dataclass(frozen=True)
class KvMemory:
    """journal: descriptor of a memory file that the pool sizes and writes."""

    arena: Arena
    journal: int

    @classmethod
    def make(cls, settings: Settings, facts: ModelFacts) -> KvMemory:
        """Decides the size, once and for all, and logs it. ValueError or OSError if it cannot be."""
        free = memory.available()
        arena = Arena.make(choose_slabs(settings, facts, free), facts)
        try:
            journal = os.memfd_create("colibri-kv-journal", os.MFD_CLOEXEC)
        except BaseException:
            arena.close()
            raise
        logger = log.get("supervisor")
        logger.info("memory", available=free, weights=facts.weight_bytes, kv_bytes=arena.size, slabs=arena.slabs,
                    slab_bytes=arena.slab_bytes, slab_tokens=arena.slab_tokens, kv_format=arena.kv_format,
                    page_bytes=arena.page, chosen_by=settings.origin("kv_bytes"))
        if facts.weight_bytes + arena.size > free:
            logger.warning("weights and KV cache together need more memory than there is: lower kv_bytes",
                           needed=facts.weight_bytes + arena.size, available=free)
        return cls(arena, journal)

    @property
    def fds(self) -> tuple[int, int]:
        return self.arena.fd, self.journal

    def close(self) -> None:
        self.arena.close()
        os.close(self.journal)
