"""One connection to the daemon: an asyncio protocol around colibri_protocol's Connection.

Frames sent in one turn of the loop leave in one write. What arrives goes to the request with its id; when the
connection ends, for whatever reason, its requests go back to the owner (session.py), who decides what becomes of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from colibri_protocol.connection import ENDS, Connection, Event, Role
from colibri_protocol.errors import Code, ConnectionFault, InvalidMessage, LocalError
from colibri_protocol.limits import FRAME_CEILING, PINGS_UNANSWERED, PROTOCOL_VERSION
from colibri_protocol.message import Message
from colibri_protocol.messages import (
    Bye,
    Cancel,
    Credit,
    Error,
    GoAway,
    Hello,
    Model,
    ModelInfo,
    Ping,
    Pong,
    Welcome,
)

from .errors import ColibriError, ConnectionLost, ProtocolViolation, RequestError, class_of, from_wire
from .request import Request, Violation
from .results import Token

CLIENT_NAME = "colibri-client-python"
GENERATIONS_KEPT = 64  # of models that a daemon was reloaded with; streams of older ones ended long ago


class Reason:
    """Why a connection ended. Each of its requests gets an exception of its own."""

    def __init__(self, make: Callable[..., ColibriError], what: Any, again: bool = False) -> None:
        """make(what, tokens) is the exception. again: another connection may help."""
        self._make, self._what, self.again = make, what, again

    def error(self, tokens: Sequence[Token] = ()) -> ColibriError:
        return self._make(self._what, tokens)


CLOSED_HERE = Reason(ConnectionLost, "the connection was closed by this client")


def lost(message: str) -> Reason:
    return Reason(ConnectionLost, message, again=True)


class Owner(Protocol):
    """What a link tells."""

    def link_freed(self, link: Link) -> None:
        """A request has ended; there is room for another."""

    def link_away(self, link: Link) -> None:
        """The server wants no new requests here."""

    def link_lost(self, link: Link, reason: Reason, requests: list[Request]) -> None:
        """The connection is gone, and these requests have not ended."""

    def request_failed(self, link: Link, request: Request, error: RequestError) -> None:
        """The server has ended the request with ERROR."""


class Link(asyncio.Protocol):
    """``welcomed``: a future of the handshake. ``closed``: one that is done when the socket is gone. ``model``: what is
    served, as last told."""

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop, ping_seconds: float,
                 next_id: Callable[[], int]) -> None:
        self._owner, self._loop, self._next_id = owner, loop, next_id
        self._connection = Connection(Role.CLIENT, max_frame=FRAME_CEILING)
        self._transport: asyncio.WriteTransport | None = None
        self._requests: dict[int, Request] = {}
        self._out: list[bytes] = []  # frames of this turn of the loop
        self._ping_seconds, self._unanswered, self._heard = ping_seconds, 0, False
        self._timer: asyncio.TimerHandle | None = None
        self._reason: Reason | None = None  # why it ends, once that is known
        self.welcome: Welcome | None = None
        self.model: ModelInfo | None = None
        self.models: dict[int, ModelInfo] = {}  # by generation, as told here
        self.welcomed: asyncio.Future[Welcome] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.away = False
        self.fresh = True  # no request has been sent here

    # ---- for the owner ----

    @property
    def usable(self) -> bool:
        """Whether new requests may be sent here."""
        return self.welcome is not None and self._reason is None and not self.away

    @property
    def room(self) -> bool:
        """Whether one more request fits into the server's limit."""
        return self.welcome is not None and len(self._connection.live) < self.welcome.limits.requests

    @property
    def idle(self) -> bool:
        return not self._requests

    @property
    def connected(self) -> bool:
        return self._transport is not None

    def start(self, request: Request, waited_ms: int) -> None:
        """Sends a request. ColibriError: it cannot be sent here, and never will be."""
        assert self.welcome is not None
        message = request.opening(waited_ms)
        request_id = self._next_id()
        try:
            self._send(message, request_id)
        except LocalError as e:
            code, limit = Code.INVALID_ARGUMENT, self.welcome.limits.frame
            raise class_of(code)(code, f"{e}; give fewer tokens", field="tokens", limit=limit) from None
        request.id, request.link, request.progressed, self.fresh = request_id, self, False, False
        self._requests[request_id] = request
        self.grant(request, request.credit(self.welcome.limits.credit))

    def grant(self, request: Request, tokens: int) -> None:
        if tokens > 0 and self.has_credit and request.id in self._connection.live:
            self._send(Credit(tokens=tokens), request.id)

    @property
    def has_credit(self) -> bool:
        return self.welcome is not None and "credit" in self.welcome.features

    def cancel(self, request: Request, reason: str) -> None:
        """Asks for the end of a request; DONE will follow."""
        if request.id in self._connection.live and self._reason is None:
            self._send(Cancel(reason=reason), request.id)

    def forget(self, request: Request) -> None:
        """Whatever still comes for this request is dropped."""
        if self._requests.pop(request.id, None) is not None:
            request.link = None

    def bye(self) -> None:
        """Ends the connection; live requests are thereby cancelled."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._reason is None:
            if self.welcome is not None and not self._connection.live:
                self._send(Bye())
            self._reason = CLOSED_HERE
        self._flush()
        self._transport.close()

    def drop(self, reason: Reason = CLOSED_HERE) -> None:
        """Ends the connection at once, without a word."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send(Hello(proto_min=PROTOCOL_VERSION, proto_max=PROTOCOL_VERSION, features=("credit",),
                         client=CLIENT_NAME))
        self._timer = self._loop.call_later(self._ping_seconds, self._tick)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        try:
            try:
                self._handle(self._connection.receive(data))
            except ConnectionFault as fault:
                self._handle(fault.events)
                raise Violation(fault.message) from None
        except Violation as e:
            self.drop(Reason(ProtocolViolation, str(e)))

    def eof_received(self) -> None:
        """Returning None closes the transport."""
        self._reason = self._reason or lost("the daemon closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        reason = self._reason = self._reason or lost(f"the connection broke: {exc or 'closed by the daemon'}")
        requests, self._requests = list(self._requests.values()), {}
        for request in requests:
            request.link = None
        self.closed.set_result(None)
        if not self.welcomed.done():
            self.welcomed.set_exception(reason.error())
            self.welcomed.exception()  # nobody may be waiting for it any more
        self._owner.link_lost(self, reason, requests)

    # ---- what arrives ----

    def _handle(self, events: list[Event]) -> None:
        requests = self._requests
        for message, request_id in events:
            if isinstance(message, InvalidMessage):
                raise Violation(message.message)
            request = requests.get(request_id)
            if type(message) is Error:
                self._failed(message, request_id, request)
            elif request is None:
                self._handle_other(message, request_id)
            elif request.take(message):
                self._ended(request)

    def _handle_other(self, message: Message, request_id: int) -> None:
        """About the connection, or of a request that was forgotten."""
        handler = _HANDLERS.get(type(message))
        if handler is not None:
            handler(self, message, request_id)
        elif type(message) in ENDS:
            self._owner.link_freed(self)

    def _ended(self, request: Request) -> None:
        del self._requests[request.id]
        request.link = None
        self._owner.link_freed(self)

    def _failed(self, message: Error, request_id: int, request: Request | None) -> None:
        if request_id == 0:
            self.drop(Reason(from_wire, message, again=message.retryable))
        elif request is not None:
            self._ended(request)
            self._owner.request_failed(self, request, from_wire(message, request.tokens))
        else:
            self._owner.link_freed(self)

    def _on_welcome(self, message: Welcome, _: int) -> None:
        self.welcome = message
        self._serve(message.generation, message.model)
        if not self.welcomed.done():
            self.welcomed.set_result(message)

    def _on_model(self, message: Model, _: int) -> None:
        self._serve(message.generation, message.model)

    def _serve(self, generation: int, model: ModelInfo) -> None:
        self.model = self.models[generation] = model
        if len(self.models) > GENERATIONS_KEPT:
            del self.models[min(self.models)]

    def _on_ping(self, message: Ping, request_id: int) -> None:
        self._send(Pong(data=message.data), request_id)

    def _on_goaway(self, message: GoAway, _: int) -> None:
        self.away = True
        self._owner.link_away(self)

    def _tick(self) -> None:
        """Asks a silent server for a sign of life while it owes an answer."""
        self._timer = self._loop.call_later(self._ping_seconds, self._tick)
        if self._heard or not self._requests:
            self._unanswered, self._heard = 0, False
            return
        if self._unanswered == PINGS_UNANSWERED:
            self.drop(lost(f"the daemon has not answered {PINGS_UNANSWERED} pings"))
            return
        self._unanswered += 1
        self._send(Ping())

    def _send(self, message: Message, request_id: int = 0) -> None:
        frame = self._connection.send(message, request_id)
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)

    def _flush(self) -> None:
        if self._out and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()


_HANDLERS: dict[type[Message], Callable[[Link, Any, int], None]] = {
    Welcome: Link._on_welcome,
    Model: Link._on_model,
    Ping: Link._on_ping,
    GoAway: Link._on_goaway,
}

