"""Takes connections off the listening socket, also when descriptors have run out.

One descriptor is kept in reserve: when there is no other, it is given up to take one connection, tell it to come back
and close it; then accepting rests for a while. Without it the loop would spin on a socket that stays readable.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable

ACCEPTS = 16  # per loop turn
REST_SECONDS = 0.1
OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """taken(socket) gets each connection; turned_away(socket) those for which no descriptor is left, and must not keep
    them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, listener: socket.socket, taken: Callable[[socket.socket], None],
                 turned_away: Callable[[socket.socket], None]) -> None:
        self._loop, self._listener, self._taken, self._turned_away = loop, listener, taken, turned_away
        listener.setblocking(False)
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._rest: asyncio.TimerHandle | None = None
        self._resume()

    def close(self) -> None:
        """The listening socket stays open: it is the supervisor's."""
        self._loop.remove_reader(self._listener.fileno())
        if self._rest is not None:
            self._rest.cancel()
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1

    def _resume(self) -> None:
        self._rest = None
        self._loop.add_reader(self._listener.fileno(), self._readable)

    def _readable(self) -> None:
        for _ in range(ACCEPTS):
            try:
                sock = self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno in OUT_OF_DESCRIPTORS:
                    return self._starved()
                continue  # that connection was gone before we came to it
            self._taken(sock)

    def _starved(self) -> None:
        if self._reserve >= 0:
            os.close(self._reserve)
            self._turn_one_away()
            try:
                self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._reserve = -1  # somebody was faster; the next rest tries without
        self._loop.remove_reader(self._listener.fileno())
        self._rest = self._loop.call_later(REST_SECONDS, self._resume)

    def _turn_one_away(self) -> None:
        try:
            sock = self._listener.accept()[0]
        except OSError:
            return
        with sock:
            self._turned_away(sock)
