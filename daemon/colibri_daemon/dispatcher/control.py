"""The control socket: what the supervisor tells the dispatcher. See common/ipc.py for the messages."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

from ..common import ipc, log

_log = log.get("control")
Handler = Callable[[dict[str, Any], list[int]], None]


class Control:
    """handlers: by the message's "t"; a handler owns the descriptors it is given. gone() is called once, at end of
    file: the supervisor is no more."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, handlers: dict[str, Handler],
                 gone: Callable[[], None]) -> None:
        self._loop, self._sock, self._handlers, self._gone = loop, sock, handlers, gone
        self._ended = False
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._readable)

    def say(self, t: str, **fields: Any) -> None:
        if not ipc.send_control(self._sock, {"t": t, **fields}):
            _log.warning("the supervisor does not listen", message=t)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()

    def read_all(self) -> None:
        """Handles what has come in, now."""
        while not self._ended and self._readable():
            pass

    def _readable(self) -> bool:
        """Whether there may be more at once."""
        try:
            received = ipc.receive_control(self._sock)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            received = None
        if received is None:
            self._ended = True
            self._loop.remove_reader(self._sock.fileno())
            self._gone()
            return False
        message, fds = received
        handler = self._handlers.get(message.get("t", ""))
        if handler is not None:
            handler(message, fds)
            return True
        for fd in fds:
            os.close(fd)
        return True
