"""Page protection for the KV arena: this process can write only the slabs that it is filling.

The other workers' keys and values are in the same memory. A wild write into them ends this process by SIGSEGV before it
has changed a byte, and nobody has to find out afterwards what is damaged. Two system calls a slab: 60 us for 1.5 MiB,
beside the second or so in which a model of that size fills it.

Pages cannot be cut: an arena on huge pages, or one whose slabs are no whole pages, stays writable, and damage is found
by the CRCs alone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_READ, _WRITE = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE


class Guard:
    """address: of slab 0, on a page. All slabs are closed at first."""

    def __init__(self, address: int, slabs: int, slab_bytes: int) -> None:
        self._address, self._slab_bytes = address, slab_bytes
        # The kernel refuses to cut a huge page; where it takes one slab it takes all.
        self.guards = not slab_bytes % mmap.PAGESIZE and not _libc.mprotect(address, slab_bytes, _READ)
        self._protect(0, slabs, _READ)

    def open(self, slabs: Iterable[int]) -> None:
        """They are about to be written."""
        for slab in slabs:
            self._protect(slab, 1, _WRITE)

    def close(self, slabs: Iterable[int]) -> None:
        """They are not written any more. Idempotent."""
        for slab in slabs:
            self._protect(slab, 1, _READ)

    def _protect(self, slab: int, count: int, access: int) -> None:
        size = self._slab_bytes
        if self.guards and _libc.mprotect(self._address + slab * size, count * size, access):
            number = ctypes.get_errno()
            raise OSError(number, f"mprotect of KV slab {slab}: {os.strerror(number)}")
