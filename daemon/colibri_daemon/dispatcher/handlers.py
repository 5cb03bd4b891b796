"""What each message of a client does: one function per message, one row per function.

A handler answers by session.send, refuses the request by raising InvalidMessage, or ends the connection by raising
ConnectionFault. Forgetting a row for a new message fails a test.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from colibri_protocol.connection import negotiate
from colibri_protocol.errors import Code, ConnectionFault, InvalidMessage
from colibri_protocol.messages import (
    AdminDrain,
    AdminDump,
    AdminEvict,
    AdminLogLevel,
    AdminReload,
    AdminResume,
    Bye,
    Cancel,
    Credit,
    Generate,
    Health,
    Hello,
    Ping,
    Pong,
    Score,
    Stats,
    TokenCheck,
    Welcome,
)

if TYPE_CHECKING:
    from .session import Session


def hello(session: Session, _: int, message: Hello) -> None:
    welcome(session, message)
    server = session.server
    if server.requests.draining:
        session.go_away(server.drain_ms())


def welcome(session: Session, message: Hello) -> None:
    proto, features = negotiate(message)
    server = session.server
    session.credit = "credit" in features
    session.welcomed = True
    session.send(Welcome(proto=proto, features=features, server=server.version, generation=server.generation,
                         model=server.model, limits=server.limits_for(session)))


def generate(session: Session, request_id: int, message: Generate) -> None:
    session.server.requests.generate(session, request_id, message)


def score(session: Session, request_id: int, message: Score) -> None:
    session.server.requests.score(session, request_id, message)


def token_check(session: Session, request_id: int, message: TokenCheck) -> None:
    session.server.requests.check(session, request_id, message)


def cancel(session: Session, request_id: int, _: Cancel) -> None:
    """An id that is not live any more, or never was, is ignored: its end may have crossed the CANCEL."""
    if (stream := session.streams.get(request_id)) is not None:
        session.server.requests.cancel(stream)


def credit(session: Session, request_id: int, message: Credit) -> None:
    if not session.credit:
        raise ConnectionFault(Code.UNSUPPORTED, "CREDIT needs the feature credit; ask for it in HELLO")
    if (stream := session.streams.get(request_id)) is not None:
        session.server.requests.credit(stream, message.tokens)


def ping(session: Session, request_id: int, message: Ping) -> None:
    session.send(Pong(data=message.data, ns=time.monotonic_ns()), request_id)


def pong(session: Session, _: int, __: Pong) -> None:
    """That something came is all we wanted."""


def health(session: Session, request_id: int, _: Health) -> None:
    session.send(session.server.health.reply(), request_id)


def stats(session: Session, request_id: int, message: Stats) -> None:
    reply = session.server.stats_reply(message.experts)
    if len(reply.expert_tokens) > session.max_frame // 2:
        raise InvalidMessage(Code.UNSUPPORTED, "this model's experts do not fit into a frame; raise max_frame",
                             "experts", limit=session.max_frame)
    session.send(reply, request_id)


def bye(session: Session, _: int, __: Bye) -> None:
    session.leave()


def administer(session: Session, _: int, message: Any) -> None:
    raise InvalidMessage(Code.PERMISSION, f"{message.NAME} is for the daemon's admin socket only")


Handler = Callable[["Session", int, Any], None]
HANDLERS: dict[type, Handler] = {
    Hello: hello, Generate: generate, Score: score, TokenCheck: token_check, Cancel: cancel, Credit: credit, Ping: ping,
    Pong: pong, Health: health, Stats: stats, Bye: bye, AdminDrain: administer, AdminResume: administer,
    AdminReload: administer, AdminEvict: administer, AdminLogLevel: administer, AdminDump: administer,
}  # fmt: skip
