"""One end of a stream between two processes: framed messages, never blocking, output bounded by its user."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from typing import Any

from . import ipc

READ_BYTES = 1 << 20


class Link:
    """sock is non-blocking. closed: the peer is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.closed = sock, False
        self._unframer = ipc.Unframer()
        self._unsent = bytearray()

    @property
    def unsent(self) -> int:
        return len(self._unsent)

    def receive(self) -> Iterator[Any]:
        """The messages that have come, of one read. ValueError if the peer does not speak the link's language."""
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.closed = self.closed or not data
        yield from self._unframer.feed(data)

    def receive_all(self) -> Iterator[Any]:
        """What a peer that has ended had still said."""
        while not self.closed and _readable(self.sock):
            yield from self.receive()

    def send(self, *messages: Any) -> None:
        """All in one write, as far as the kernel takes them."""
        for message in messages:
            self._unsent += ipc.pack(message)
        self.flush()

    def flush(self) -> None:
        """Hands the kernel what it takes."""
        while self._unsent and not self.closed:
            try:
                del self._unsent[: self.sock.send(self._unsent)]
            except BlockingIOError:
                return
            except OSError:  # what it had said before can still be read
                self._unsent.clear()

    def close(self) -> None:
        self.sock.close()


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()  # select() knows no descriptor over 1023
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
