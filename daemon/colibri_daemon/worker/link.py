"""The worker's end of the link to the dispatcher: framed messages, never blocking, output bounded by its user."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

from ..common import ipc

READ_BYTES = 1 << 20
FULL_BYTES = 1 << 20  # unsent output from which the worker waits instead of making more


class Link:
    """sock is non-blocking. closed: the dispatcher is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.closed = sock, False
        self._unframer = ipc.Unframer()
        self._unsent = bytearray()

    @property
    def unsent(self) -> int:
        return len(self._unsent)

    @property
    def full(self) -> bool:
        return len(self._unsent) >= FULL_BYTES

    def receive(self) -> Iterator[Any]:
        """The messages that have come. ValueError if the dispatcher does not speak the link's language."""
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.closed = self.closed or not data
        yield from self._unframer.feed(data)

    def send(self, message: Any) -> None:
        self._unsent += ipc.pack(message)
        self.flush()

    def flush(self) -> None:
        """Hands the kernel what it takes."""
        while self._unsent and not self.closed:
            try:
                del self._unsent[: self.sock.send(self._unsent)]
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
