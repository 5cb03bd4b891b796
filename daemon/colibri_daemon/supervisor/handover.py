"""A child that is a fresh interpreter: it sees the package as it is installed now, not as it was when the supervisor
started. The supervisor forks as always (spawn.py), and the child executes

    python -P -m colibri_daemon.supervisor.born FORMAT FD

What it is to do stands in the memory file FD; descriptors, death with the parent, ignored signals, stdio and the OOM
score outlast the exec.

FORMAT tells versions of the package apart that write it differently, or whose control messages (common/ipc.py) differ:
such a version cannot be taken over by a running supervisor, only by a restart.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from ..common.arena import Arena
from ..common.facts import ModelFacts
from ..common.pages import Book, Page
from ..common.settings import Settings
from .roles import Role

FORMAT = 1
MODULE = "colibri_daemon.supervisor.born"


def _socket(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)  # as all of ours
    return sock


# kind → (type, to JSON, from JSON)
_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "socket": (socket.socket, lambda sock: sock.fileno(), _socket),
    "page": (Page, lambda page: page.place, lambda place: Page.open(*place)),
    "book": (Book, lambda book: book.fd, Book),
    "settings": (Settings, Settings.to_json, Settings.from_json),
    "facts": (ModelFacts, ModelFacts.to_wire, ModelFacts.from_wire),
    "arena": (Arena, asdict, lambda body: Arena(**body)),
    "plain": (object, lambda value: value, lambda value: value),  # a number, such as a descriptor, or text by name
}


@dataclass(frozen=True)
class Birth:
    """A role to live, and what for. fault: descriptor for the traceback of a fatal signal."""

    role: Role
    settings: Settings
    fault: int
    arguments: tuple[object, ...]

    def become(self) -> NoReturn:
        """By the forked child, which has no descriptors but those it is to keep. OSError if there is no interpreter."""
        fd = self._written()
        set_inheritable(True)
        os.execv(sys.executable, [sys.executable, "-P", "-m", MODULE, str(FORMAT), str(fd)])

    def _written(self) -> int:
        """A descriptor of the memory file."""
        body = {"role": asdict(self.role), "settings": self.settings.to_json(), "fault": self.fault,
                "arguments": [_encoded(argument) for argument in self.arguments]}  # fmt: skip
        fd = os.memfd_create("colibri-birth", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(fd), "w") as file:
            json.dump(body, file)
        return fd

    @classmethod
    def read(cls, fd: int) -> Birth:
        """Closes fd."""
        with os.fdopen(fd) as file:
            file.seek(0)
            body = json.load(file)
        arguments = tuple(_KINDS[kind][2](value) for kind, value in body["arguments"])
        for memory in set(pages_of(arguments)):  # the mapping is enough
            os.close(memory)
        return cls(Role(**body["role"]), Settings.from_json(body["settings"]), body["fault"], arguments)


def set_inheritable(inheritable: bool) -> None:
    """All open descriptors but stdio's."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}"):  # not the one that listed them
            os.set_inheritable(fd, inheritable)


def _encoded(argument: object) -> tuple[str, Any]:
    kind = next(kind for kind, (type_, _, _) in _KINDS.items() if isinstance(argument, type_))
    return kind, _KINDS[kind][1](argument)


def pages_of(arguments: tuple[object, ...]) -> Iterator[int]:
    """The descriptors of pages and books, which a forked child would not need."""
    for argument in arguments:
        if isinstance(argument, Page):
            yield argument.place[0]
        elif isinstance(argument, Book):
            yield argument.fd
