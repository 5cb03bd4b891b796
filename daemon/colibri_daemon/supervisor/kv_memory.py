"""The memory of a KV cache: made before the processes that use it, and kept while they come and go.

The arena holds keys and values; the journal what the pool must know of them when it starts again. The supervisor writes
neither. While a reload replaces one arena by another both exist; what they take together stays within the new one's
size, but for what one request of full length needs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..common import log, memory
from ..common.arena import Arena, choose_slabs, longest_request
from ..common.facts import ModelFacts
from ..common.settings import Settings


@dataclass(frozen=True)
class KvMemory:
    """journal: descriptor of a memory file that the pool sizes and writes. least: slabs that must be usable from the
    start."""

    arena: Arena
    journal: int
    least: int

    @classmethod
    def make(cls, settings: Settings, facts: ModelFacts, taken: int = 0) -> KvMemory:
        """Decides the size, once and for all, and logs it. taken: bytes of the arenas that are there already and will
        go. ValueError or OSError if it cannot be."""
        free = memory.available()
        slabs = choose_slabs(settings, facts, free + taken)
        least = min(slabs, longest_request(settings, facts))
        if taken and least * facts.slab_bytes > free:
            raise ValueError(f"beside the present KV cache a new one needs {least * facts.slab_bytes >> 20} MiB at "
                             f"first, for one request of full length, and {free >> 20} MiB of memory are free: lower "
                             "max_tokens_total, or restart instead")  # fmt: skip
        arena = Arena.make(slabs, facts)
        try:
            journal = os.memfd_create("colibri-kv-journal", os.MFD_CLOEXEC)
        except BaseException:
            arena.close()
            raise
        _log(settings, facts, arena, free, taken)
        return cls(arena, journal, least)

    def usable(self, taken: int) -> int:
        """How many slabs may have pages while others' take so many bytes."""
        return min(self.arena.slabs, max(self.least, (self.arena.size - taken) // self.arena.slab_bytes))

    @property
    def fds(self) -> tuple[int, int]:
        return self.arena.fd, self.journal

    def close(self) -> None:
        self.arena.close()
        os.close(self.journal)


def _log(settings: Settings, facts: ModelFacts, arena: Arena, free: int, taken: int) -> None:
    logger = log.get("supervisor")
    logger.info("memory", available=free, weights=facts.weight_bytes, kv_bytes=arena.size, slabs=arena.slabs,
                slab_bytes=arena.slab_bytes, slab_tokens=arena.slab_tokens, kv_format=arena.kv_format,
                page_bytes=arena.page, chosen_by=settings.origin("kv_bytes"))
    if facts.weight_bytes + arena.size > free + taken:
        logger.warning("weights and KV cache together need more memory than there is: lower kv_bytes",
                       needed=facts.weight_bytes + arena.size, available=free + taken)
