"""One client connection: its socket, its protocol state, its limits and time-outs. handlers.py says what messages do.

All time-outs are judged in ``tick``, which the server calls several times a second with the clock's reading.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from colibri_protocol.codec import error_message
from colibri_protocol.connection import Connection, Role
from colibri_protocol.errors import Code, ConnectionFault, InvalidMessage, LocalError, ProtocolError
from colibri_protocol.limits import (
    FRAME_SECONDS,
    HELLO_SECONDS,
    OUTPUT_HARD,
    OUTPUT_SOFT,
    PAUSED_SECONDS,
    PING_SECONDS,
    PINGS_UNANSWERED,
    SLOW_READER_SECONDS,
)
from colibri_protocol.messages import GoAway, Ping

from ..common import log
from .channel import Channel

if TYPE_CHECKING:
    from .server import Server
    from .streams import Stream

SO_PEERGROUPS, MOST_GROUPS = 59, 256
_log = log.get("session")


@dataclass(frozen=True)
class Timeouts:
    """Seconds, but for pings (how many may be unanswered) and bytes: soft pauses requests, hard closes."""

    hello: float = HELLO_SECONDS
    frame: float = FRAME_SECONDS
    ping: float = PING_SECONDS
    pings: int = PINGS_UNANSWERED
    slow_reader: float = SLOW_READER_SECONDS
    pause: float = PAUSED_SECONDS
    linger: float = 5.0  # for a peer to read the last words
    soft: int = OUTPUT_SOFT
    hard: int = OUTPUT_HARD


class Peer(NamedTuple):
    """SO_PEERCRED: who connected."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    return Peer(*struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)))


def groups_of(sock: socket.socket, peer: Peer) -> frozenset[int]:
    """The groups of whoever connected, as they were then. Only the first one where there are more than MOST_GROUPS or
    where the kernel does not tell (Linux before 4.13)."""
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4 * MOST_GROUPS)
    except OSError:
        data = b""
    return frozenset((peer.gid, *array("I", data)))


class Session:
    """number: unique, for logs. streams: the live requests by the client's ids."""

    def __init__(self, server: Server, sock: socket.socket, peer: Peer, number: int, max_requests: int) -> None:
        self.server, self.peer, self.number, self.max_requests = server, peer, number, max_requests
        self.max_frame = server.settings.max_frame  # as this connection was told
        self.conn = Connection(Role.SERVER, max_frame=self.max_frame)
        self.streams: dict[int, Stream] = {}
        self.owed = 0  # answers that wait for another process, other than the streams'
        self.credit = False  # negotiated
        self.last_id = 0  # of the last request accepted
        self._away = False  # GOAWAY was said
        self.welcomed = self.leaving = False  # leaving: BYE or half-closed; closes when nothing is live
        self.pausing = False  # its requests are kept out of the batches until it reads
        self._timeouts = server.timeouts
        self.opened = self._heard = server.clock()
        self._pings = 0
        self._frame_since: float | None = None  # a frame is half received since
        self._soft_since: float | None = None  # more than the soft limit is unread since
        self._closing_since: float | None = None
        self.channel = Channel(server.outbox, sock, self, self._timeouts.soft)

    # ---- input -----------------------------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        self._heard, self._pings = self.server.clock(), 0
        fault = None
        try:
            events = self.conn.receive(data)
        except ConnectionFault as e:
            fault, events = e, e.events
        for message, request_id in events:
            if self.closing:
                return
            self._handle(message, request_id)
        if fault is not None:
            return self.fail(fault)
        if not self.conn.needs_more:
            self._frame_since = None
        elif events or self._frame_since is None:
            self._frame_since = self._heard

    def _handle(self, message: Any, request_id: int) -> None:
        """Whatever a client sends ends here; an exception that is not the client's fault costs it the connection."""
        try:
            if isinstance(message, InvalidMessage):
                raise message
            self.server.stats.add("frames_total", direction="in", type=message.NAME)
            self.server.handlers[type(message)](self, request_id, message)
        except InvalidMessage as e:
            self._refuse(e, request_id)
        except ConnectionFault as e:
            self.fail(e)
        except Exception:
            incident = os.urandom(4).hex()
            _log.exception("a message could not be handled", incident=incident, connection=self.number,
                           type=type(message).__name__)
            self.fail(ConnectionFault(Code.INTERNAL, f"a fault of the daemon; incident {incident} in its log"))

    def _refuse(self, error: InvalidMessage, request_id: int) -> None:
        """The request fails, the connection lives on."""
        self.server.stats.refused(error)
        self.send(error_message(error, retry_after_ms=getattr(error, "retry_after_ms", None)), request_id)

    def ended(self, error: OSError | None) -> None:
        """The client has shut its side, or is gone."""
        if error is not None:
            return self.drop()
        try:
            self.conn.receive_eof()
        except ConnectionFault as e:
            return self.fail(e)
        if self.conn.closed:
            self.drop()
        else:
            self.leave()

    @property
    def closing(self) -> bool:
        """Only the last words are still being written."""
        return self._closing_since is not None

    # ---- output ----------------------------------------------------------------------------------------------------

    def send(self, message: Any, request_id: int = 0) -> None:
        """At the end of the loop turn. Nothing is said any more on a connection that closes."""
        if self.closing or self.channel.closed:
            return
        try:
            self.channel.write(self.conn.send(message, request_id))
            self.server.stats.add("frames_total", direction="out", type=message.NAME)
        except LocalError:  # a fault of ours, which must not hurt the caller: it may be serving other clients
            _log.exception("a message could not be sent", connection=self.number, type=type(message).__name__)
            self.drop()

    def go_away(self, deadline_ms: int) -> None:
        if self.welcomed and not self._away:
            self._away = True
            self.send(GoAway(reason="drain", last_id=self.last_id, deadline_ms=deadline_ms))

    def crowded(self) -> None:
        """More than the soft limit is unread after a write."""
        if self.channel.buffered > self._timeouts.hard:
            self._slow()
        elif self._soft_since is None:
            self._soft_since = self.server.clock()
        elif self.channel.buffered > self._timeouts.hard // 2:
            self._pause()

    def _pause(self) -> None:
        self.pausing = True
        for stream in self.streams.values():
            self.server.requests.pause(stream)

    def _resume(self) -> None:
        self._soft_since, self.pausing = None, False
        for stream in self.streams.values():
            self.server.requests.resume(stream)

    def _slow(self) -> None:
        self.server.stats.add("slow_reader_disconnects_total")
        self.channel.drop_unsent()
        self.fail(ConnectionFault(Code.SLOW_READER, "the client does not read what it asked for",
                                  limit=self._timeouts.hard))

    # ---- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Judges every time-out."""
        if self._closing_since is not None:
            if self.channel.closed or now - self._closing_since >= self._timeouts.linger:
                self.drop()
        elif not self.welcomed and now - self.opened >= self._timeouts.hello:
            self.fail(ConnectionFault(Code.READ_TIMEOUT, f"no HELLO within {self._timeouts.hello:g} s"))
        elif self._frame_since is not None and now - self._frame_since >= self._timeouts.frame:
            self.fail(ConnectionFault(Code.READ_TIMEOUT, f"no rest of a frame within {self._timeouts.frame:g} s"))
        elif self.channel.buffered and now - self.channel.progress_at >= self._timeouts.slow_reader:
            self._slow()
        else:
            self._tick_output(now)
            self._tick_idle(now)

    def _tick_output(self, now: float) -> None:
        if self._soft_since is None:
            return
        if self.channel.buffered <= self._timeouts.soft:
            self._resume()
        elif now - self._soft_since >= self._timeouts.pause:
            self._pause()

    def _tick_idle(self, now: float) -> None:
        if self.leaving:
            if hung_up(self.channel.fd):
                self.drop()
        elif now - self._heard >= self._timeouts.ping * (self._pings + 1) and self.welcomed:
            if self._pings >= self._timeouts.pings:
                _log.info("a connection does not answer", connection=self.number, uid=self.peer.uid)
                return self.drop()
            self._pings += 1
            self.send(Ping())

    # ---- ends ------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """The client asks for nothing more: what is live goes on, then the connection closes."""
        self.leaving = True
        self.request_ended()

    def request_ended(self) -> None:
        if self.leaving and not self.streams and not self.owed:
            self._close()

    def answered(self) -> None:
        """One of those owed was sent."""
        self.owed -= 1
        self.request_ended()

    def fail(self, fault: ProtocolError) -> None:
        """ERROR with id 0, and the end of everything live."""
        if self.closing:
            return
        self.server.stats.fault(fault)
        _log.info("connection closed", connection=self.number, uid=self.peer.uid, code=fault.code.name,
                  reason=fault.message)
        self.send(error_message(fault))
        self._close()

    def drop(self) -> None:
        """At once; what was not sent is lost."""
        self._close()
        self.channel.close()
        self.server.remove(self)

    def _close(self) -> None:
        """Cancels what is live, reads no more and closes when everything is written."""
        if self.closing:
            return
        self._closing_since = self.server.clock()
        streams, self.streams = list(self.streams.values()), {}
        for stream in streams:
            self.server.requests.abandon(stream)
        self.channel.finish()
        if self.channel.closed:
            self.server.remove(self)


def hung_up(fd: int) -> bool:
    """The peer has closed altogether, which end of input alone does not tell."""
    poll = select.poll()
    poll.register(fd, 0)
    return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))
