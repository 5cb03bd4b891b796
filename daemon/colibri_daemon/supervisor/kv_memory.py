"""The memory of a KV cache: made before the processes that use it, and kept while they come and go; with systemd's
store of descriptors also while the whole service does.

The arena holds keys and values; the journal what the pool must know of them when it starts again; the note what the
next life of the service must know of both. The supervisor writes the note alone. While a reload replaces one arena by
another both exist; what they take together stays within the new one's size, but for what one request of full length
needs.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass

from ..common import log, memory
from ..common.arena import Arena, choose_slabs, longest_request
from ..common.facts import ModelFacts
from ..common.settings import Settings
from .fdstore import ARENA, JOURNAL, NOTE, FdStore, give_up
from .kv_note import Note, about, refusal

MOST_STARTS = 2  # in a row that did not end in a ready service; then what is kept may be the reason
_SEAL_WRITE = fcntl.F_SEAL_WRITE | 0x10  # F_SEAL_FUTURE_WRITE, Python 3.13
_SEAL_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True)
class KvMemory:
    """journal: descriptor of a memory file that the pool sizes and writes. least: slabs that must be usable from the
    start."""

    arena: Arena
    journal: int
    note: Note
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
        note = Note.make(about(settings, facts, slabs))
        try:
            arena = Arena.make(slabs, facts)
            try:
                journal = os.memfd_create("colibri-kv-journal", os.MFD_CLOEXEC)
            except BaseException:
                arena.close()
                raise
        except BaseException:
            note.close()
            raise
        _log(settings, facts, arena, free, taken)
        return cls(arena, journal, note, least)

    @classmethod
    def kept(cls, store: FdStore, settings: Settings, facts: ModelFacts) -> KvMemory | None:
        """What the former life of the service left in the store, if it is whole and was made for this model and
        configuration. What is refused is dropped from the store, and its memory is free on return. Whether the journal
        can be read is the pool's to see, whether a slab holds what the journal says a worker's."""
        found = {kind: taken[1] for kind in (ARENA, JOURNAL, NOTE) if (taken := store.take(kind)) is not None}
        if not found:
            return None
        try:
            if missing := {ARENA, JOURNAL, NOTE} - found.keys():
                raise ValueError(f"{' and '.join(sorted(missing))} is not there")
            return cls._adopted(found, settings, facts)
        except (OSError, ValueError) as e:
            log.get("supervisor").warning("the kept KV cache is not used", reason=str(e))
            for kind, fd in found.items():
                store.drop(kind)
                give_up(fd)
        return None

    @classmethod
    def _adopted(cls, found: dict[str, int], settings: Settings, facts: ModelFacts) -> KvMemory:
        _check_memory(found[NOTE], "note")
        note = Note(found[NOTE])
        if reason := refusal(note.about, settings, facts):
            raise ValueError(reason)
        if note.starts >= MOST_STARTS:
            raise ValueError(f"the service has not become ready with it {note.starts} times in a row")
        _check_memory(found[ARENA], "arena")
        _check_memory(found[JOURNAL], "journal", _SEAL_SIZE)
        arena = Arena(found[ARENA], note.about["slabs"], facts.slab_bytes, facts.slab_tokens, facts.kv_format)
        arena.check()
        note.begin()
        _log(settings, facts, arena, memory.available(), os.fstat(arena.fd).st_blocks * 512)
        return cls(arena, found[JOURNAL], note, min(arena.slabs, longest_request(settings, facts)))

    def usable(self, taken: int) -> int:
        """How many slabs may have pages while others' take so many bytes."""
        return min(self.arena.slabs, max(self.least, (self.arena.size - taken) // self.arena.slab_bytes))

    @property
    def fds(self) -> tuple[int, int]:
        return self.arena.fd, self.journal

    def keep(self, store: FdStore) -> None:
        """For the next life, in place of any other."""
        for kind, fd in ((ARENA, self.arena.fd), (JOURNAL, self.journal), (NOTE, self.note.fd)):
            store.keep(kind, fd)

    def close(self) -> None:
        self.arena.close()
        self.note.close()
        os.close(self.journal)


def _check_memory(fd: int, name: str, seals: int = 0) -> None:
    """ValueError if it is no memory file that can be written, and has none of these seals."""
    try:
        found = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise ValueError(f"its {name} is no memory file") from None
    if found & (_SEAL_WRITE | seals) or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise ValueError(f"its {name} cannot be written: seals {found:#x}")


def _log(settings: Settings, facts: ModelFacts, arena: Arena, free: int, taken: int) -> None:
    logger = log.get("supervisor")
    logger.info("memory", available=free, weights=facts.weight_bytes, kv_bytes=arena.size, slabs=arena.slabs,
                slab_bytes=arena.slab_bytes, slab_tokens=arena.slab_tokens, kv_format=arena.kv_format,
                page_bytes=arena.page, chosen_by=settings.origin("kv_bytes"))
    if facts.weight_bytes + arena.size > free + taken:
        logger.warning("weights and KV cache together need more memory than there is: lower kv_bytes",
                       needed=facts.weight_bytes + arena.size, available=free + taken)
