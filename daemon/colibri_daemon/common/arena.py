"""The KV arena: one piece of shared memory for the keys and values of all workers, cut into slabs of equal size.

The supervisor makes it once, before it forks; it lives as long as anybody has its descriptor. It is sealed at its
size, so whoever has checked that once may rely on it. Its pages are taken in advance, by reserve() in the pool's
process: what is missing is missed at the start and not in the middle of a request. Who may use which slab is the pool's
to say.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from . import memory
from .facts import ModelFacts
from .kv import MOST_CHUNK, slabs_needed
from .settings import Settings

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
SLICE = 64 << 20  # bytes reserved between two reports of progress
_PAGE = mmap.PAGESIZE
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def longest_request(settings: Settings, facts: ModelFacts) -> int:
    """Slabs that a request of full length takes."""
    chunk = settings.step_tokens or MOST_CHUNK
    return slabs_needed(facts.max_len, facts.pinned, facts.window, chunk, facts.slab_tokens)


def most_slabs(settings: Settings, facts: ModelFacts) -> int:
    """That can be in use at once."""
    return longest_request(settings, facts) * settings.max_seqs * settings.workers


def choose_slabs(settings: Settings, facts: ModelFacts, free: int) -> int:
    """How many slabs there will be: as configured, or the default of kv_bytes. free: bytes, as memory.available().
    ValueError if there is no room for one, or less than was asked for."""
    if not settings.kv_bytes:
        most = most_slabs(settings, facts)
        return memory.kv_bytes(free, facts.weight_bytes, facts.slab_bytes, most) // facts.slab_bytes
    slabs = settings.kv_bytes // facts.slab_bytes
    if not slabs:
        raise ValueError(f"kv_bytes is {settings.kv_bytes}, but one slab of {facts.slab_tokens} tokens takes "
                         f"{facts.slab_bytes}: raise kv_bytes or lower slab_tokens")  # fmt: skip
    if settings.kv_bytes > free:
        raise ValueError(f"kv_bytes is {settings.kv_bytes >> 20} MiB, but only {free >> 20} MiB of memory are free: "
                         "the KV cache cannot be had; lower kv_bytes")  # fmt: skip
    return slabs


@dataclass(frozen=True)
class Arena:
    """fd: the memory's; inherited by children that keep it. Slab i is bytes [i * slab_bytes, (i + 1) * slab_bytes)."""

    fd: int
    slabs: int
    slab_bytes: int
    slab_tokens: int
    kv_format: str

    @classmethod
    def make(cls, slabs: int, facts: ModelFacts) -> Arena:
        """On huge pages of the system's pool if enough of them are free, else on ordinary ones. OSError if the system
        has no shared memory for it. Nothing is reserved yet."""
        size = slabs * facts.slab_bytes
        fd = _memory(size)
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, slabs, facts.slab_bytes, facts.slab_tokens, facts.kv_format)

    @property
    def size(self) -> int:
        """Bytes of all slabs; the memory may be longer by less than one page."""
        return self.slabs * self.slab_bytes

    @property
    def page(self) -> int:
        """Bytes of one of its pages."""
        return os.fstatvfs(self.fd).f_bsize

    @property
    def geometry(self) -> dict[str, Any]:
        """What both ends of a link compare (pool_ipc.HELLO)."""
        return {"slabs": self.slabs, "slab_bytes": self.slab_bytes, "slab_tokens": self.slab_tokens,
                "kv_format": self.kv_format}  # fmt: skip

    def reserve(self, progress: Callable[[int], None], slabs: int | None = None) -> None:
        """Takes all its pages, or those of the first so many slabs, a slice at a time; progress() is told how many
        bytes there are so far. Returns at once if that was done before. OSError if there is not so much memory."""
        size = os.fstat(self.fd).st_size if slabs in (None, self.slabs) else slabs * self.slab_bytes
        done = os.fstat(self.fd).st_blocks * 512 >= size
        for at in range(0, 0 if done else size, SLICE):
            os.posix_fallocate(self.fd, at, min(SLICE, size - at))
            progress(min(at + SLICE, size))
        progress(size)

    def extend(self, start: int, slabs: int) -> int:
        """Takes pages of slabs from ``start`` to ``slabs``, at most a slice; the first that has none yet. OSError."""
        end = min(slabs, start + max(1, SLICE // self.slab_bytes))
        os.posix_fallocate(self.fd, start * self.slab_bytes, (end - start) * self.slab_bytes)
        return end

    def give_back(self, slabs: Iterable[int]) -> None:
        """Gives the system the pages of these slabs, whose contents are lost. A page that belongs to two slabs stays.
        Whoever writes them again takes new ones. OSError."""
        page = self.page
        for slab in slabs:
            start, end = _whole(slab * self.slab_bytes, page), (slab + 1) * self.slab_bytes // page * page
            if start < end:
                punch(self.fd, start, end - start)

    def check(self) -> None:
        """ValueError if it is not the sealed memory it should be. OSError if it is no memory file at all."""
        size, seals = os.fstat(self.fd).st_size, fcntl.fcntl(self.fd, fcntl.F_GET_SEALS)
        if not self.size <= size < self.size + self.page or seals & SEALS != SEALS:
            raise ValueError(f"the KV arena has {size} bytes and seals {seals:#x}, it should have {self.size} in whole "
                             f"pages and {SEALS:#x}")  # fmt: skip

    def map(self) -> mmap.mmap:
        """The whole arena, shared, left out of core dumps. ValueError if it is not the sealed memory it should be."""
        self.check()
        mapped = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
        mapped.madvise(mmap.MADV_DONTDUMP)
        with suppress(OSError):  # a kernel without huge pages, or pages that are huge already
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return mapped

    def close(self) -> None:
        os.close(self.fd)


def punch(fd: int, start: int, size: int) -> None:
    """Gives the system the whole pages within [start, start + size). OSError."""
    if size and _libc.fallocate(fd, _PUNCH_HOLE, start, size):
        number = ctypes.get_errno()
        raise OSError(number, f"pages of a memory file: {os.strerror(number)}")


def _memory(size: int) -> int:
    """An empty memfd of at least size bytes."""
    huge = _free_huge_pages()
    if huge * _huge_page() >= size > 0:
        with suppress(OSError):  # taken by somebody else meanwhile, or not for us
            return _sized("colibri-kv", os.MFD_HUGETLB, _whole(size, _huge_page()))
    return _sized("colibri-kv", 0, _whole(size, _PAGE))


def _sized(name: str, flags: int, size: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _whole(size: int, page: int) -> int:
    return -(-size // page) * page


def _huge_page() -> int:
    """Bytes of a huge page of the default size; 0 if there are none."""
    return 1024 * memory.machine("Hugepagesize:")


def _free_huge_pages() -> int:
    """Not promised to anybody."""
    return memory.machine("HugePages_Free:") - memory.machine("HugePages_Rsvd:")
