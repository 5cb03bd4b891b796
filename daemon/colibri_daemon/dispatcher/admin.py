"""The admin socket: a second listening socket, for the daemon's own user and root, with the client protocol on it but
other messages in it. One function per message and one row per function, as in handlers.py.

What concerns the dispatcher is done here: draining, resuming, evicting, dumping. For the rest the supervisor is asked
over control, and answers when it is done (common/ipc.py). Each message gets one ADMIN_REPLY.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from colibri_protocol.errors import Code, ConnectionFault, InvalidMessage
from colibri_protocol.messages import (
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
    Generate,
    Health,
    Hello,
    Ping,
    Pong,
    Score,
    Stats,
    StatsReply,
    TokenCheck,
)

from ..common import log
from . import handlers
from .admission import owner_of
from .dump import dump, shortened
from .handlers import Handler
from .server import Server
from .session import Peer, Session

CONNECTIONS = 16  # at a time
LEVELS = ("debug", "info", "warning", "error")
_log = log.get("admin")


@dataclass(frozen=True)
class Levers:
    """What the dispatcher lets an administrator do. drain() stops taking requests; resume() is whether they are taken
    again, which they are not once the daemon itself is stopping; say() sends a message to the supervisor."""

    drain: Callable[[], None]
    resume: Callable[[], bool]
    say: Callable[..., None]


class AdminServer(Server):
    """clients: the server whose connections and requests are administered."""

    def __init__(self, clients: Server, levers: Levers) -> None:
        super().__init__(clients.outbox, clients.generations, clients.requests, clients.stats, clients.health,
                         clients.timeouts)
        self.handlers = HANDLERS
        self.clients, self.levers = clients, levers
        self._asked: dict[int, Session] = {}  # by our id
        self._request_ids: dict[int, int] = {}
        self._next_id = 1

    def ask(self, session: Session, request_id: int, do: str, **fields: Any) -> None:
        """Of the supervisor; its answer becomes the reply."""
        number, self._next_id = self._next_id, self._next_id + 1
        self._asked[number], self._request_ids[number] = session, request_id
        session.owed += 1
        self.levers.say("admin", id=number, do=do, **fields)

    def answered(self, message: dict[str, Any]) -> None:
        """The supervisor's answer. To one that is not awaited: another dispatcher had asked."""
        session, request_id = self._asked.pop(message["id"], None), self._request_ids.pop(message["id"], 0)
        if session is not None:
            reply(session, request_id, message["result"], "" if message["ok"] else message["error"])
            session.answered()

    def stats_reply(self, with_experts: bool) -> StatsReply:
        return self.clients.stats_reply(with_experts)

    def refusal(self, sock: socket.socket, peer: Peer) -> ConnectionFault | None:
        """The socket's mode says the same, but modes can be changed."""
        if peer.uid not in (0, os.geteuid()):
            return ConnectionFault(Code.PERMISSION, f"user {peer.uid} may not administer this daemon; only root and "
                                   f"user {os.geteuid()} may")
        if len(self.sessions) >= CONNECTIONS:
            return ConnectionFault(Code.TOO_MANY_CONNECTIONS, f"{CONNECTIONS} connections are open; close one",
                                   limit=CONNECTIONS)
        return None


def reply(session: Session, request_id: int, result: dict[str, Any], error: str = "") -> None:
    """error: why it was not done."""
    text = shortened(result, session.max_frame // 2)
    session.send(AdminReply(ok=not error, error=error[:1000], result=text), request_id)


# ---- handlers ------------------------------------------------------------------------------------------------------


def hello(session: Session, _: int, message: Hello) -> None:
    handlers.welcome(session, message)


def drain(session: Session, request_id: int, _: AdminDrain) -> None:
    server = _server(session)
    _log.info("asked to drain", uid=session.peer.uid, requests=len(server.requests.live))
    server.levers.drain()
    reply(session, request_id, {"live": len(server.requests.live)})


def resume(session: Session, request_id: int, _: AdminResume) -> None:
    done = _server(session).levers.resume()
    _log.info("asked to resume", uid=session.peer.uid, done=done)
    reply(session, request_id, {}, "" if done else "the daemon is stopping; start it again instead")


def reload(session: Session, request_id: int, message: AdminReload) -> None:
    _log.info("asked to reload", uid=session.peer.uid, everything=message.everything)
    _server(session).ask(session, request_id, "reload", everything=message.everything)


def log_level(session: Session, request_id: int, message: AdminLogLevel) -> None:
    if message.level not in LEVELS:
        raise InvalidMessage(Code.INVALID_ARGUMENT, f"level is {message.level!r}; it must be one of "
                             f"{', '.join(LEVELS)}", "level")
    _log.info("asked for another log level", uid=session.peer.uid, to=message.level, of=message.role)
    _server(session).ask(session, request_id, "log_level", level=message.level, role=message.role)


def evict(session: Session, request_id: int, message: AdminEvict) -> None:
    """All pools are asked; the last to answer makes the reply."""
    if message.tenant is not None and message.uid is None:
        raise InvalidMessage(Code.INVALID_ARGUMENT, "tenant is given without uid; tenants of different users have "
                             "nothing to do with each other", "uid")
    owner = None if message.uid is None else owner_of(message.uid, message.tenant)
    _log.info("asked to evict", uid=session.peer.uid, of=message.uid, tenant=message.tenant)
    pools = list(dict.fromkeys(generation.pool for generation in _server(session).generations))
    found: list[int | None] = []
    session.owed += 1
    for pool in pools:
        pool.evict(owner, partial(_evicted, session, request_id, len(pools), found))


def _evicted(session: Session, request_id: int, pools: int, found: list[int | None], slabs: int | None) -> None:
    found.append(slabs)
    if len(found) < pools:
        return
    freed = sum(slabs for slabs in found if slabs is not None)
    reply(session, request_id, {"slabs": freed}, "the KV pool does not answer; try again" if None in found else "")
    session.answered()


def state(session: Session, request_id: int, _: AdminDump) -> None:
    reply(session, request_id, dump(_server(session).clients))


def elsewhere(session: Session, request_id: int, message: Any) -> None:
    raise InvalidMessage(Code.PERMISSION, f"{message.NAME} is not for the admin socket; use the client socket")


def _server(session: Session) -> AdminServer:
    assert isinstance(session.server, AdminServer)
    return session.server


HANDLERS: dict[type, Handler] = {
    Hello: hello, AdminDrain: drain, AdminResume: resume, AdminReload: reload, AdminEvict: evict,
    AdminLogLevel: log_level, AdminDump: state, Ping: handlers.ping, Pong: handlers.pong, Health: handlers.health,
    Stats: handlers.stats, Bye: handlers.bye, Generate: elsewhere, Score: elsewhere, TokenCheck: elsewhere,
    Cancel: handlers.cancel, Credit: handlers.credit,
}  # fmt: skip
