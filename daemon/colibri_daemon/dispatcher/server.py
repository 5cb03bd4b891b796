"""The client side of the dispatcher: accepts connections within their limits and keeps the sessions."""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections import Counter
from importlib.metadata import version

from colibri_protocol.codec import encode, error_message
from colibri_protocol.errors import Code, ConnectionFault
from colibri_protocol.messages import LimitInfo, Model, ModelInfo, StatsReply

from ..common import experts, log
from ..common.pages import Book
from ..common.settings import Settings
from .accept import Acceptor
from .channel import Outbox
from .generation import Generations
from .handlers import HANDLERS
from .health import HealthBoard
from .requests import Requests
from .session import Peer, Session, Timeouts, groups_of, peer_of
from .stats import Stats, report, show

CONNECTION_RETRY_MS = 1000
_log = log.get("server")


class Server:
    """What sessions and handlers need of the rest."""

    def __init__(self, outbox: Outbox, generations: Generations, requests: Requests, stats: Stats, health: HealthBoard,
                 timeouts: Timeouts, book: Book | None = None) -> None:
        """book: where the workers count their experts' tokens; None: nobody does."""
        self.outbox, self.clock, self.timeouts = outbox, outbox.clock, timeouts
        self.requests, self.stats, self.health = requests, stats, health
        self.version = f"colibrid {version('colibri-daemon')}"
        self.generations, self.handlers = generations, HANDLERS
        self.sessions: set[Session] = set()
        self._book = book
        self._per_uid: Counter[int] = Counter()
        self._opened = 0
        self._started = self.clock()
        self._acceptor: Acceptor | None = None
        self._drain_until = self._started

    @property
    def generation(self) -> int:
        return self.generations.serving.number

    @property
    def model(self) -> ModelInfo:
        facts = self.generations.serving.facts
        return ModelInfo(
            name=facts.name, id=facts.id, fingerprint=facts.fingerprint, vocab_size=facts.vocab_size,
            max_len=facts.max_len, eos_ids=facts.eos_ids, pinned=facts.pinned, window=facts.window,
            positions=facts.positions, block=facts.slab_tokens, kv_format=facts.kv_format, folder=facts.folder,
        )  # fmt: skip

    @property
    def settings(self) -> Settings:
        """Those of the generation that serves."""
        return self.generations.serving.settings

    @property
    def idle(self) -> bool:
        """Everything that was to be sent is sent."""
        return not any(session.channel.buffered or session.channel.out for session in self.sessions)

    def listen(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        self._acceptor = Acceptor(loop, listener, self._accepted, self._no_descriptor)

    def serve_another(self) -> None:
        """Another generation serves from now on: what is told of the model, and the limits of new connections."""
        for session in list(self.sessions):
            if session.welcomed:
                session.send(Model(generation=self.generation, model=self.model))

    def stop_accepting(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None

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

    @property
    def uptime(self) -> float:
        return self.clock() - self._started

    def limits_for(self, session: Session) -> LimitInfo:
        return LimitInfo(frame=session.max_frame, requests=session.max_requests)

    def show(self) -> None:
        """The gauges."""
        show(self.stats, self.requests, self.generations, [s.channel.buffered for s in self.sessions],
             sum(s.pausing for s in self.sessions))

    def stats_reply(self, with_experts: bool) -> StatsReply:
        self.show()
        width, counts = (experts.tokens(self._book, self.generations.serving.facts.id)
                         if with_experts and self._book is not None else (0, []))
        return report(self.stats, self.requests, self.generations, len(self.sessions), self.uptime,
                      (width, array("Q", counts).tobytes()))

    def _accepted(self, sock: socket.socket) -> None:
        peer = peer_of(sock)
        if (refusal := self.refusal(sock, peer)) is not None:
            result = "refused_auth" if refusal.code is Code.PERMISSION else "refused_limit"
            self.stats.add("connections_total", result=result)
            with sock:
                self._tell(sock, refusal)
            return
        self.stats.add("connections_total", result="accepted")
        self._opened += 1
        self._per_uid[peer.uid] += 1
        settings = self.settings
        trusted = peer.uid in settings.trusted_uids
        limit = settings.requests_per_connection_trusted if trusted else settings.requests_per_connection
        self.sessions.add(Session(self, sock, peer, self._opened, limit))

    def _may_connect(self, sock: socket.socket, peer: Peer) -> bool:
        """As far as the daemon is asked: the socket's mode has let it in."""
        settings = self.settings
        if not settings.allowed_uids and not settings.allowed_gids:
            return True
        return (peer.uid in settings.allowed_uids or peer.uid in settings.trusted_uids
                or bool(settings.allowed_gids) and not groups_of(sock, peer).isdisjoint(settings.allowed_gids))

    def refusal(self, sock: socket.socket, peer: Peer) -> ConnectionFault | None:
        """Why the connection is closed at once; None if it is not."""
        if not self._may_connect(sock, peer):
            return ConnectionFault(Code.PERMISSION, f"user {peer.uid} may not connect; add the user to allowed_uids, "
                                   "or a group to allowed_gids")
        for count, limit, whose in (
            (len(self.sessions), self.settings.connections, "open"),
            (self._per_uid[peer.uid], self.settings.connections_per_uid, f"open by user {peer.uid}"),
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
            later = CONNECTION_RETRY_MS if fault.code is Code.TOO_MANY_CONNECTIONS else None
            sock.send(encode(error_message(fault, retry_after_ms=later)))
        except OSError:
            return
