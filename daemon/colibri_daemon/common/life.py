"""A sign of life that the kernel takes back: how others learn that a process is being killed before it is taken apart.

A process that is killed first gives up its memory, which takes milliseconds, and then closes its descriptors: only then
do its sockets end and its pidfd become readable. But before all that the kernel goes through the list of robust futexes
of each thread that ends, marks them as left by a dead owner and wakes who waits (do_exit → exit_mm → futex_exit_release
in its source). LIFE in a page is such a word, owned by the main thread of the page's process; see set_robust_list(2)
and the kernel's robust-futex-ABI.rst.

What it says is that this thread runs no more: whatever it wrote to sockets is in them, and nothing will follow. Other
threads of the process may run a moment longer, and its memory is still mapped. How it ends exit_status() in process.py
can tell by then.

Best effort: where it cannot be had, nobody is told before the end of the sockets.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

from .pages import Field, Page

_WAIT, _WAKE, _ALL = 0, 1, (1 << 31) - 1
_WAITERS, _OWNER_DIED = 1 << 31, 1 << 30  # of a futex word; the other bits are its owner's thread id
_ENDED = _WAITERS | _OWNER_DIED
_NUMBERS = {"x86_64": (202, 273), "aarch64": (98, 99)}  # of the system calls futex and set_robust_list
_FUTEX, _SET_ROBUST_LIST = _NUMBERS.get(os.uname().machine, (0, 0)) if sys.maxsize > 1 << 32 else (0, 0)
_libc = ctypes.CDLL(None, use_errno=True)


class _Robust(ctypes.Structure):
    """struct robust_list_head with room for its only entry behind it. offset: from an entry to its futex word."""

    _fields_ = (("first", ctypes.c_void_p), ("offset", ctypes.c_long), ("pending", ctypes.c_void_p),
                ("next", ctypes.c_void_p))  # fmt: skip


_HEAD_BYTES = _Robust.next.offset
_list = _Robust()  # of the thread that called arm(): the kernel reads it at that thread's end …
_words: list[ctypes.c_uint32] = []  # … and writes to this one, which keeps the page mapped


def arm(page: Page) -> None:
    """From now on the kernel tells of the end of this thread. Called once, by the main thread of the page's process.
    The list that the C library made for the thread is replaced: it must own no robust mutex."""
    if not _FUTEX:
        return
    word, head = _word(page), ctypes.addressof(_list)
    entry = head + _HEAD_BYTES
    _list.first, _list.next, _list.offset = entry, head, ctypes.addressof(word) - entry
    if not _syscall(_SET_ROBUST_LIST, head, _HEAD_BYTES):
        _words.append(word)
        word.value = _WAITERS | os.getpid()  # the bit makes the kernel wake


def wait(page: Page, pid: int) -> bool:
    """Sleeps, in a thread of its own, until the main thread of this process ends. False if that cannot be told, or if
    the page is another process's by now. Never wakes for a process that is stopped or hangs."""
    word, alive = _word(page), _WAITERS | pid
    while word.value == alive:
        if _syscall(_FUTEX, ctypes.addressof(word), _WAIT, alive) and ctypes.get_errno() not in _HARMLESS:
            return False
    if not has_ended(page):
        return False
    _syscall(_FUTEX, ctypes.addressof(word), _WAKE, _ALL)  # the kernel wakes only one
    return True


def has_ended(page: Page) -> bool:
    """Whether the main thread of its process has, until another one is started."""
    return bool(_word(page).value == _ENDED)


_HARMLESS = (errno.EAGAIN, errno.EINTR)  # the word has changed; a signal


def _word(page: Page) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_buffer(page.memory, 8 * Field.LIFE)


def _syscall(number: int, *arguments: int) -> int:
    padded = (*arguments, 0, 0, 0, 0, 0)[:6]
    return int(_libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, padded)))
