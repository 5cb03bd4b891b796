"""The state of one connection, without its socket: bytes in, events out; messages in, bytes out.

Both roles use the one table below: what a client may send in a state is what a server accepts in it. Nothing here
blocks or keeps time, and events do not depend on how the byte stream is cut into pieces.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from .codec import Envelope, decode_body, encode, open_envelope, plain_tokens
from .errors import Code, ConnectionFault, InvalidMessage, LocalError
from .framing import Framer
from .limits import FEATURES, HEADER_BYTES, MAX_FRAME, PROTOCOL_VERSION
from .message import BOTH, CLIENT, IGNORABLE, MESSAGES, SERVER, Message
from .messages import (
    AdminDrain,
    AdminDump,
    AdminEvict,
    AdminLogLevel,
    AdminReload,
    AdminReply,
    AdminResume,
    Bye,
    Cancel,
    Credit,
    Done,
    Error,
    Generate,
    GoAway,
    Hello,
    Model,
    Score,
    Scores,
    TokenCheck,
    TokenCheckReply,
    TokensOut,
    Welcome,
)


class Role(StrEnum):
    """The value is what Message.SENDER calls this side."""

    CLIENT = CLIENT
    SERVER = SERVER


class State(StrEnum):
    """Of what one side may still say."""

    START = "nothing said yet"
    OPEN = "HELLO or WELCOME said"
    ENDING = "BYE or GOAWAY said: no new requests, live ones go on"
    CLOSED = "may say nothing any more"


class Event(NamedTuple):
    """What the peer said. message is an InvalidMessage if a request is refused: the server answers it with ERROR under
    that id and goes on."""

    message: Any
    id: int


REQUESTS = frozenset({Generate, Score, TokenCheck})  # an id is live from one of these ...
ENDS = frozenset({Done, Error, TokenCheckReply})  # ... to one of these
ABOUT_LIVE = frozenset({TokensOut, Scores, Done, TokenCheckReply})  # only with a live id
ADMIN = frozenset({AdminDrain, AdminResume, AdminReload, AdminEvict, AdminLogLevel, AdminDump, AdminReply})
ABOUT_REQUEST = REQUESTS | ABOUT_LIVE | {Cancel, Credit} | ADMIN  # never with id 0
ABOUT_CONNECTION = frozenset({Hello, Welcome, GoAway, Bye, Model})  # always with id 0; all others: as the sender likes


def _says(role: Role) -> frozenset[type[Message]]:
    return frozenset(m for m in MESSAGES.values() if m.SENDER in (role, BOTH)) - {Hello, Welcome}


# What each side may say in each state of its own. Beyond the table: the server's ERROR with id 0 is allowed until it is
# CLOSED and closes both sides; WELCOME comes after HELLO; requests may follow HELLO without waiting for WELCOME; a
# request of an ENDING client, or to an ENDING server, fails by itself.
ALLOWED: dict[tuple[Role, State], frozenset[type[Message]]] = {
    (Role.CLIENT, State.START): frozenset({Hello}),
    (Role.CLIENT, State.OPEN): _says(Role.CLIENT),
    (Role.CLIENT, State.ENDING): _says(Role.CLIENT) - {Bye},
    (Role.CLIENT, State.CLOSED): frozenset(),
    (Role.SERVER, State.START): frozenset({Welcome}),
    (Role.SERVER, State.OPEN): _says(Role.SERVER),
    (Role.SERVER, State.ENDING): _says(Role.SERVER) - {GoAway},
    (Role.SERVER, State.CLOSED): frozenset(),
}
NEXT: dict[type[Message], State] = {
    Hello: State.OPEN,
    Welcome: State.OPEN,
    Bye: State.ENDING,
    GoAway: State.ENDING,
}


def negotiate(hello: Hello) -> tuple[int, tuple[str, ...]]:
    """The protocol version and the features for WELCOME. ConnectionFault VERSION if there is no common version."""
    if not hello.proto_min <= PROTOCOL_VERSION <= hello.proto_max:
        raise ConnectionFault(Code.VERSION, f"this daemon speaks protocol version {PROTOCOL_VERSION}, the client "
                                            f"{hello.proto_min} to {hello.proto_max}")
    return PROTOCOL_VERSION, tuple(name for name in FEATURES if name in hello.features)


class Connection:
    """max_frame: longest payload accepted. A server sends no longer ones either; a client keeps to WELCOME's limit.

    live: request ids in use, in either role. sides: the state of each side."""

    def __init__(self, role: Role, max_frame: int = MAX_FRAME) -> None:
        self.role, self.peer = role, Role.SERVER if role is Role.CLIENT else Role.CLIENT
        self.sides = {Role.CLIENT: State.START, Role.SERVER: State.START}
        self.live: set[int] = set()
        self.half_close_ok = False  # the client's, from HELLO
        self.features: tuple[str, ...] = ()  # on, from WELCOME
        self._framer = Framer(max_frame)
        self._send_limit = max_frame

    @property
    def needs_more(self) -> bool:
        """A frame is half received."""
        return self._framer.pending > 0

    @property
    def closed(self) -> bool:
        """One side will say nothing any more."""
        return State.CLOSED in self.sides.values()

    @property
    def finished(self) -> bool:
        """The transport may be closed once everything sent is flushed: closed, or ending with nothing live."""
        return self.closed or State.ENDING in self.sides.values() and not self.live

    # ---- receiving -------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> list[Event]:
        """The events that data completes; none once the peer's side is closed. ConnectionFault if the connection must
        be closed; its `events` are those that came before. A server reports it first: send(error_message(fault))."""
        events: list[Event] = []
        sides, peer, closed = self.sides, self.peer, State.CLOSED
        if sides[peer] is closed:
            return events
        try:
            for payload in self._framer.feed(data):
                if (event := self._event(payload)) is not None:
                    events.append(event)
                if sides[peer] is closed:
                    break
        except ConnectionFault as fault:
            self._close_peer()
            fault.events = events
            raise
        return events

    def receive_eof(self) -> None:
        """The peer has shut its sending side. For a client that said half_close_ok it means BYE, else CLOSED.
        ConnectionFault if that was in the middle of a frame."""
        cut = self.needs_more
        if self.half_close_ok and self.peer is Role.CLIENT and not self.closed and not cut:
            self.sides[self.peer] = State.ENDING
            return
        self._close_peer()
        if cut:
            raise ConnectionFault(Code.PROTOCOL, "the stream ends in the middle of a frame")

    def _close_peer(self) -> None:
        self.sides[self.peer] = State.CLOSED
        self._framer.clear()

    def _event(self, payload: bytes) -> Event | None:
        plain = plain_tokens(payload)
        if plain is not None and plain[1] in self.live and TokensOut in ALLOWED[self.peer, self.sides[self.peer]]:
            return Event(*plain)
        envelope = open_envelope(payload)
        try:
            message = self._message(envelope)
        except InvalidMessage as refused:
            return Event(refused, envelope.id)
        return None if message is None else Event(message, envelope.id)

    def _message(self, envelope: Envelope) -> Message | None:
        """The message, or None for one to be ignored. InvalidMessage if it fails by itself."""
        kind = MESSAGES.get(envelope.tag)
        if kind is None:
            return self._unknown(envelope)
        if (reason := self._misuse(self.peer, kind, envelope.id)) is not None:
            raise ConnectionFault(Code.PROTOCOL, reason)
        if kind in REQUESTS and (conflict := self._conflict(envelope.id)) is not None:
            raise conflict
        message = self._body(envelope, kind)
        self._advance(self.peer, message, envelope.id)
        return message

    def _unknown(self, envelope: Envelope) -> None:
        if envelope.tag >= IGNORABLE:
            return
        reason = f"type {envelope.tag} is unknown"
        if envelope.id == 0 or self.sides[self.peer] is State.START:
            raise ConnectionFault(Code.PROTOCOL, reason)
        if envelope.id in self.live:  # ERROR with another code would end that request
            raise InvalidMessage(Code.DUPLICATE_ID, f"{reason}, and request {envelope.id} is live")
        raise InvalidMessage(Code.PROTOCOL, reason)

    def _body(self, envelope: Envelope, kind: type[Message]) -> Message:
        """A bad body fails the request, if it is one of its own; else it fails the connection: a server's ERROR with id
        0, or with a live id, would say something else."""
        try:
            return decode_body(envelope, kind)
        except InvalidMessage as e:
            if envelope.id and not (self.role is Role.SERVER and envelope.id in self.live):
                if kind in ENDS:
                    self.live.discard(envelope.id)
                raise
            raise ConnectionFault(Code.PROTOCOL, f"{kind.NAME}: {e.message}", e.field, e.index, e.limit) from None

    # ---- sending ---------------------------------------------------------------------------------------------------

    def send(self, message: Message, id: int = 0) -> bytes:  # noqa: A002
        """The frame that says message. LocalError if it is not allowed now; the state is then as before."""
        kind = type(message)
        if (reason := self._misuse(self.role, kind, id)) is not None:
            raise LocalError(reason)
        if kind in REQUESTS and (conflict := self._conflict(id)) is not None:
            raise LocalError(conflict.message)
        if kind is Credit and "credit" not in self.features:
            raise LocalError("CREDIT needs the feature credit, which WELCOME did not turn on")
        data = encode(message, id)
        if (size := len(data) - HEADER_BYTES) > self._send_limit:
            raise LocalError(f"{message.NAME} has {size} bytes; the frame limit is {self._send_limit}")
        self._advance(self.role, message, id)
        return data

    # ---- both ------------------------------------------------------------------------------------------------------

    def _misuse(self, speaker: Role, kind: type[Message], request_id: int) -> str | None:
        """Why speaker may not say this now, whatever is in it; None if it may."""
        state = self.sides[speaker]
        if kind not in ALLOWED[speaker, state] or kind is Welcome and self.sides[Role.CLIENT] is State.START:
            return self._not_allowed(speaker, kind, request_id)
        if request_id == 0 and kind in ABOUT_REQUEST:
            return f"{kind.NAME} needs a request id; 0 is the connection"
        if request_id != 0 and kind in ABOUT_CONNECTION:
            return f"{kind.NAME} is about the connection; its id is 0, not {request_id}"
        if kind in ABOUT_LIVE and request_id not in self.live:
            return f"{kind.NAME} for request {request_id}, which is not live"
        return None

    def _not_allowed(self, speaker: Role, kind: type[Message], request_id: int) -> str | None:
        state = self.sides[speaker]
        if kind.SENDER not in (speaker, BOTH):
            return f"{kind.NAME} is not sent by a {speaker.name.lower()}"
        if kind is Error and request_id == 0 and state is not State.CLOSED:
            return None
        if state is State.START:
            return f"{kind.NAME} before {'HELLO' if speaker is Role.CLIENT or kind is Welcome else 'WELCOME'}"
        return f"{kind.NAME} {'on a closed connection' if state is State.CLOSED else 'again'}"

    def _conflict(self, request_id: int) -> InvalidMessage | None:
        """Why a new request fails by itself, whatever is in it."""
        if request_id in self.live:
            return InvalidMessage(Code.DUPLICATE_ID, f"request {request_id} is live on this connection; choose another "
                                                     "id or wait for its end")
        if self.sides[Role.CLIENT] is State.ENDING:
            return InvalidMessage(Code.PROTOCOL, "a new request after BYE; open another connection")
        if self.sides[Role.SERVER] is State.ENDING:
            return InvalidMessage(Code.DRAINING, "the daemon is stopping; send the request to another instance")
        return None

    def _advance(self, speaker: Role, message: Message, request_id: int) -> None:
        """The state after speaker said message."""
        kind = type(message)
        if kind in REQUESTS:
            self.live.add(request_id)
        elif kind in ENDS:
            self._end(message, request_id)
        elif kind in NEXT:
            self.sides[speaker] = NEXT[kind]
            self._learn(message)

    def _end(self, message: Message, request_id: int) -> None:
        if isinstance(message, Error) and request_id == 0:
            self.sides.update(dict.fromkeys(Role, State.CLOSED))
            self._framer.clear()
        elif not isinstance(message, Error) or message.code != Code.DUPLICATE_ID:  # which ends the second message only
            self.live.discard(request_id)

    def _learn(self, message: Message) -> None:
        """What the handshake settles."""
        if isinstance(message, Hello):
            self.half_close_ok = message.half_close_ok
        elif isinstance(message, Welcome):
            self.features = message.features
            if self.role is Role.CLIENT:
                self._send_limit = message.limits.frame
