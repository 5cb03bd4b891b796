"""Non-blocking stream sockets, to clients and to workers alike: what arrives is handed on, what is to be sent waits for
the end of the loop turn and then goes out in one write. Nothing here blocks or limits: the owner looks at ``buffered``.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, Protocol

READ_BYTES = 64 << 10  # at most per socket and loop turn, so that no peer holds the others up
WRITE_BUFFERS = 64  # chunks in one writev


class Outbox:
    """The channels that got output in this loop turn. clock: monotonic seconds. stir() is called when something comes
    in or is to go out, on any of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float]) -> None:
        self.loop, self.clock = loop, clock
        self.stir: Callable[[], None] = _nothing
        self._marked: list[Channel] = []

    def add(self, channel: Channel) -> None:
        if not self._marked:
            self.loop.call_soon(self.flush)
            self.stir()
        self._marked.append(channel)

    def flush(self) -> None:
        """The end of the turn."""
        marked, self._marked = self._marked, []
        try:
            while marked:
                marked.pop().flush()
        finally:
            if marked:  # one failed; the others must not wait for ever
                self._marked += marked
                self.loop.call_soon(self.flush)


def _nothing() -> None:
    """Nobody wants to know."""


class Owner(Protocol):
    """Who is told what happens on a channel."""

    def received(self, data: bytes) -> None: ...

    def ended(self, error: OSError | None) -> None: ...

    def crowded(self) -> None: ...


class Channel:
    """Owns the socket. owner.received(data) is called for input; owner.ended(error) at end of input (None), after which
    the channel can still write, and when the socket fails, after which it is closed; owner.crowded() when a turn leaves
    more than high bytes that the kernel did not take."""

    __slots__ = ("_chunks", "_high", "_linger", "_loop", "_outbox", "_owner", "_reading", "_sock", "_writing",
                 "buffered", "fd", "marked", "out", "progress_at")  # fmt: skip

    def __init__(self, outbox: Outbox, sock: socket.socket, owner: Owner, high: int) -> None:
        sock.setblocking(False)
        self._loop, self._outbox, self._sock = outbox.loop, outbox, sock
        self._owner, self._high = owner, high
        self.fd = sock.fileno()
        self.out: list[bytes] = []  # whole messages of this loop turn; whoever appends calls mark() unless marked
        self.marked = False
        self.buffered = 0  # bytes of earlier turns that the kernel has not taken
        self.progress_at = 0.0  # when it last took some, while there are any
        self._chunks: deque[bytes | memoryview] = deque()  # those bytes; each is whole messages, but for the first
        self._writing = self._linger = False
        self._reading = True
        self._loop.add_reader(self.fd, self._readable)

    @property
    def closed(self) -> bool:
        return self.fd < 0

    def write(self, message: bytes) -> None:
        """A whole message, sent at the end of the turn. Ignored once closed."""
        self.out.append(message)
        if not self.marked:
            self.mark()

    def mark(self) -> None:
        self.marked = True
        self._outbox.add(self)

    def flush(self) -> None:
        """Writes what this turn left in ``out``, as far as the kernel takes it."""
        self.marked = False
        out = self.out
        if self.fd < 0 or not out:
            return out.clear()
        chunk = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        if self._writing:
            self._keep(chunk)
        elif (sent := self._try(self._sock.send, chunk)) < len(chunk) and self.fd >= 0:
            self.progress_at = self._outbox.clock()
            self._keep(memoryview(chunk)[sent:] if sent else chunk)
            self._start_writing()
        if self.buffered > self._high:
            self._owner.crowded()

    def _keep(self, chunk: bytes | memoryview) -> None:
        self._chunks.append(chunk)
        self.buffered += len(chunk)

    def drop_unsent(self) -> None:
        """Forgets the messages of which no byte was sent."""
        self.out.clear()
        while len(self._chunks) > 1:
            self.buffered -= len(self._chunks.pop())

    def stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self.fd)

    def finish(self) -> None:
        """Reads no more, and closes when everything is written."""
        if self.fd < 0:
            return
        self._linger = True
        self.stop_reading()
        self.flush()
        if self.fd >= 0 and not self.buffered:
            self.close()

    def close(self) -> None:
        """At once; ended is not called."""
        if self.fd < 0:
            return
        self.stop_reading()
        self._stop_writing()
        self.fd = -1
        self._sock.close()
        self._chunks.clear()
        self.out.clear()
        self.buffered = 0

    def read_all(self) -> None:
        """What has come in, now. For a peer that sends nothing any more."""
        while self._reading and self._readable():
            pass

    def _readable(self) -> bool:
        """Whether there may be more at once."""
        try:
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as e:
            self._fail(e)
            return False
        self._outbox.stir()
        if data:
            self._owner.received(data)
        else:
            self.stop_reading()
            self._owner.ended(None)
        return bool(data)

    def _write(self) -> None:
        """The socket takes more."""
        if sent := self._try(self._sock.sendmsg, list(islice(self._chunks, WRITE_BUFFERS))):
            self._took(sent)
        if not self._chunks:
            self._stop_writing()
            if self._linger:
                self.close()

    def _try(self, send: Callable[[Any], int], data: Any) -> int:
        """How many bytes the kernel takes now. Closes the channel if the socket is broken."""
        try:
            return send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as e:
            self._fail(e)
            return 0

    def _took(self, sent: int) -> None:
        """The kernel took this many bytes."""
        self.buffered -= sent
        self.progress_at = self._outbox.clock()
        while sent:
            first = self._chunks.popleft()
            if sent < len(first):
                self._chunks.appendleft(memoryview(first)[sent:])
                return
            sent -= len(first)

    def _start_writing(self) -> None:
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self.fd, self._write)

    def _stop_writing(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self.fd)

    def _fail(self, error: OSError) -> None:
        was_open = self.fd >= 0
        self.close()
        if was_open:
            self._owner.ended(error)
