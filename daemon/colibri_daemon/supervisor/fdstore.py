"""Descriptors that systemd keeps for the next life of the service: its file descriptor store (sd_notify(3),
sd_listen_fds(3)).

    store = FdStore(notifier, passed(os.environ))     at the start: what the former life left
    store.take(ARENA)                                 the caller's from now on
    store.keep(ARENA, fd); store.flush()              for the next life

A name is a kind from the list below, with a detail behind it where the kind has one. systemd keeps what it was given
while the service restarts, for whatever reason, and closes it when the service is stopped for good. What comes back is
not trusted: whoever takes it checks it, and says drop() if it is not right.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections import deque
from collections.abc import Iterable, MutableMapping
from contextlib import suppress

from ..common import log
from ..common.arena import punch
from .notify import Notifier

FIRST_PASSED = 3  # SD_LISTEN_FDS_START
CLIENTS, ADMIN = "colibri-clients", "colibri-admin"  # listening sockets; detail: whose file (sockets.py)
ARENA, JOURNAL, NOTE = "colibri-kv", "colibri-kv-journal", "colibri-kv-note"  # one KvMemory
KINDS = (CLIENTS, ADMIN, ARENA, JOURNAL, NOTE)
SEPARATOR = "."


class PassedError(ValueError):
    """LISTEN_FDS is no number."""


def passed(environ: MutableMapping[str, str]) -> list[tuple[str, int]]:
    """(name, descriptor) of all that systemd passed to this process, made close-on-exec. The variables are taken out of
    the environment. Raises PassedError."""
    pid, fds, names = (environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()):
        return []
    if not fds.isdigit():
        raise PassedError(f"LISTEN_FDS is {fds!r}; it must be a number")
    found = []
    for index in range(int(fds)):
        os.set_inheritable(FIRST_PASSED + index, False)
        found.append(((names.split(":")[index : index + 1] or [""])[0], FIRST_PASSED + index))
    return found


class FdStore:
    """passed: (name, descriptor); those that are not of our kinds are left alone."""

    def __init__(self, notifier: Notifier, passed: Iterable[tuple[str, int]] = ()) -> None:
        self._notifier = notifier
        self._found = [(name, fd) for name, fd in passed if kind_of(name) in KINDS]
        self._kept: dict[str, str] = {}  # name in the store, by kind
        self._outbox: deque[tuple[dict[str, object], int | None]] = deque()
        self._log = log.get("store")

    @property
    def works(self) -> bool:
        """Whether there is somebody who may keep things."""
        return self._notifier.listened_to

    def take(self, kind: str) -> tuple[str, int] | None:
        """(detail, descriptor) of what the former life left, which is the caller's to use or to close, and stays in the
        store until drop(). None if nothing is there, or more than one thing, which is then dropped."""
        found = [(name, fd) for name, fd in self._found if kind_of(name) == kind]
        self._found = [(name, fd) for name, fd in self._found if kind_of(name) != kind]
        if len(found) == 1:
            name, fd = found[0]
            self._kept[kind] = name
            return name.partition(SEPARATOR)[2], fd
        for name, fd in found:
            self._log.warning("kept twice, dropped", name=name)
            give_up(fd)
            self._say({"FDSTOREREMOVE": 1, "FDNAME": name})
        return None

    def keep(self, kind: str, fd: int, detail: str = "") -> None:
        """For the next life, in place of what there is of this kind. The caller's descriptor stays its own."""
        self.drop(kind)
        self._kept[kind] = f"{kind}{SEPARATOR}{detail}" if detail else kind
        if self.works:
            # FDPOLL=0: else systemd lets go of a descriptor that it thinks has hung up.
            self._say({"FDSTORE": 1, "FDNAME": self._kept[kind], "FDPOLL": 0}, os.dup(fd))

    def drop(self, kind: str) -> None:
        """The next life is not to have it."""
        if (name := self._kept.pop(kind, None)) is not None:
            self._say({"FDSTOREREMOVE": 1, "FDNAME": name})

    def flush(self) -> None:
        """Sends what systemd has not taken yet."""
        while self._outbox:
            fields, fd = self._outbox[0]
            if not self._notifier.send(fds=() if fd is None else (fd,), **fields):
                return
            self._outbox.popleft()
            if fd is not None:
                os.close(fd)

    def _say(self, fields: dict[str, object], fd: int | None = None) -> None:
        self._outbox.append((fields, fd))
        self.flush()


def kind_of(name: str) -> str:
    return name.partition(SEPARATOR)[0]


def give_up(fd: int) -> None:
    """Closes what is not used. What it stood for ends now, not when systemd has closed its own: connecting to a socket
    is refused, memory is free."""
    mode = os.fstat(fd).st_mode
    with suppress(OSError):  # a socket that does not listen, memory that is sealed against writing
        if stat.S_ISSOCK(mode):
            with socket.socket(fileno=os.dup(fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
        elif stat.S_ISREG(mode) and fcntl.fcntl(fd, fcntl.F_GET_SEALS) >= 0:  # memory, not a file of a disk
            page = os.fstatvfs(fd).f_bsize
            punch(fd, 0, -(-os.fstat(fd).st_size // page) * page)
    os.close(fd)
