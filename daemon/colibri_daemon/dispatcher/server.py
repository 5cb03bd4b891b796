"""The client side of the dispatcher: accepts connections within their limits and keeps the sessions."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from importlib.metadata import version

from colibri_protocol.codec import encode, error_message
from colibri_protocol.errors import Code, ConnectionFault
from colibri_protocol.messages import LimitInfo, ModelInfo, StatsReply

from ..common import log
from ..common.facts import ModelFacts
from ..common.settings import Settings
from .accept import Acceptor
from .channel import Outbox
from .health import HealthBoard
from .pool_link import PoolLink
from .requests import Requests
from .session import Peer, Session, Timeouts, peer_of
from .stats import Stats, report
from .workers import WorkerPool

CONNECTION_RETRY_MS = 1000
_log = log.get("server")


class Server:
    """What sessions and handlers need of the rest."""

    def __init__(self, outbox: Outbox, settings: Settings, facts: ModelFacts, requests: Requests,
                 workers: WorkerPool, pool: PoolLink, stats: Stats, health: HealthBoard, timeouts: Timeouts) -> None:
        self.outbox, self.clock, self.timeouts = outbox, outbox.clock, timeouts
        self.requests, self.stats, self.health = requests, stats, health
        self.version, self.generation = f"colibrid {version('colibri-daemon')}", 1
        self.max_frame = settings.max_frame
        self.model = ModelInfo(
            name=facts.name, id=facts.id, fingerprint=facts.fingerprint, vocab_size=facts.vocab_size,
            max_len=facts.max_len, eos_ids=facts.eos_ids, pinned=facts.pinned, window=facts.window,
            positions=facts.positions, block=facts.slab_tokens, kv_format=facts.kv_format, folder=facts.folder,
        )  # fmt: skip
        self._settings, self._workers, self._pool = settings, workers, pool
        self.sessions: set[Session] = set()
        self._per_uid: Counter[int] = Counter()
        self._opened = 0
        self._started = self.clock()
        self._acceptor: Acceptor | None = None
        self._drain_until = self._started

    @property
    def idle(self) -> bool:
        """Everything that was to be sent is sent."""
        return not any(session.channel.buffered or session.channel.out for session in self.sessions)

    def listen(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        self._acceptor = Acceptor(loop, listener, self._accepted, self._no_descriptor)

    def go_away(self, seconds: float) -> None:
        """Tells every client that no new requests are taken, and how long live ones may go on."""
        self._drain_until = self.clock() + seconds
        for session in list(self.sessions):
            session.go_away(self.drain_ms())

    def drain_ms(self) -> int:
        return max(0, round((self._drain_until - self.clock()) * 1000))

    def tick(self, now: float) -> None:
        for session in list(self.sessions):
            try:
                session.tick(now)
            except Exception:
                _log.exception("a connection could not be looked after", connection=session.number)
                session.drop()

    def close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        for session in list(self.sessions):
            session.drop()

    def remove(self, session: Session) -> None:
        """The session's socket is closed. Idempotent."""
        if session in self.sessions:
            self.sessions.remove(session)
            self._per_uid[session.peer.uid] -= 1
            if not self._per_uid[session.peer.uid]:
                del self._per_uid[session.peer.uid]

    def limits_for(self, session: Session) -> LimitInfo:
        return LimitInfo(frame=self.max_frame, requests=session.max_requests)

    def stats_reply(self) -> StatsReply:
        return report(self.stats, self.requests, self._workers, self._pool,
                      [s.channel.buffered for s in self.sessions], sum(s.pausing for s in self.sessions),
                      self.clock() - self._started)

    def _accepted(self, sock: socket.socket) -> None:
        peer = peer_of(sock)
        if (refusal := self._refusal(peer)) is not None:
            self.stats.add("connections_total", result="refused_limit")
            with sock:
                self._tell(sock, refusal)
            return
        self.stats.add("connections_total", result="accepted")
        self._opened += 1
        self._per_uid[peer.uid] += 1
        trusted = peer.uid in self._settings.trusted_uids
        limit = self._settings.requests_per_connection_trusted if trusted else self._settings.requests_per_connection
        self.sessions.add(Session(self, sock, peer, self._opened, limit))

    def _refusal(self, peer: Peer) -> ConnectionFault | None:
        for count, limit, whose in (
            (len(self.sessions), self._settings.connections, "open"),
            (self._per_uid[peer.uid], self._settings.connections_per_uid, f"open by user {peer.uid}"),
        ):
            if count >= limit:
                return ConnectionFault(Code.TOO_MANY_CONNECTIONS, f"{count} connections are {whose}; close one or "
                                       "raise the limit", limit=limit)
        return None

    def _no_descriptor(self, sock: socket.socket) -> None:
        self.stats.add("connections_total", result="emfile")
        self._tell(sock, ConnectionFault(Code.TOO_MANY_CONNECTIONS, "the daemon has no file descriptor left"))

    def _tell(self, sock: socket.socket, fault: ConnectionFault) -> None:
        """Best effort, to a connection that is closed next."""
        self.stats.fault(fault)
        sock.setblocking(False)
        try:
            sock.send(encode(error_message(fault, retry_after_ms=CONNECTION_RETRY_MS)))
        except OSError:
            return
