"""A worker can write only the slabs that it is filling; what happens to one that tries to is tried in a child."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal

import pytest
from colibri_daemon.worker.guard import Guard

SLABS = 8


def memory(slab_bytes: int) -> tuple[mmap.mmap, int]:
    mapped = mmap.mmap(-1, SLABS * slab_bytes)
    return mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def end_of_a_write(mapped: mmap.mmap, at: int) -> int:
    """How a process ends that writes there: by which signal, or 0."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        mapped[at] = 1
        os._exit(0)
    return -os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("slab_bytes", [mmap.PAGESIZE, 3 * mmap.PAGESIZE])
def test_only_open_slabs_can_be_written(slab_bytes: int) -> None:
    mapped, address = memory(slab_bytes)
    guard = Guard(address, SLABS, slab_bytes)
    guard.open([2, 3, 6])
    guard.close([3, 7])
    ends = [end_of_a_write(mapped, slab * slab_bytes + at) for slab in range(SLABS) for at in (0, slab_bytes - 1)]
    assert ends == [0 if slab in (2, 6) else signal.SIGSEGV for slab in range(SLABS) for _ in range(2)]
    assert mapped[3 * slab_bytes] == 0  # all can be read
    guard.open(range(SLABS))


def test_slabs_that_are_no_whole_pages_stay_writable() -> None:
    size = mmap.PAGESIZE + 64
    mapped, address = memory(size)
    guard = Guard(address, SLABS, size)
    assert not guard.guards
    guard.close(range(SLABS))
    mapped[:] = b"x" * len(mapped)
