"""Administration of a running daemon, over its admin socket."""

from __future__ import annotations

import json
import os
from types import TracebackType
from typing import Any

from colibri_protocol.errors import InvalidMessage
from colibri_protocol.message import Message
from colibri_protocol.messages import (
    AdminDrain,
    AdminDump,
    AdminEvict,
    AdminLogLevel,
    AdminReload,
    AdminReply,
    AdminResume,
)

from .dial import socket_path
from .errors import AdminFailed, from_local
from .request import Question
from .sync import Client

SUFFIX = ".admin"


def admin_path(path: str | os.PathLike[str] | None = None, socket: str | os.PathLike[str] | None = None) -> str:
    """The path given, else $COLIBRI_ADMIN_SOCKET, else that of the client socket with .admin behind it."""
    if path is not None:
        return os.fspath(path)
    return os.environ.get("COLIBRI_ADMIN_SOCKET") or socket_path(socket) + SUFFIX


class Admin:
    """A connection to the daemon's admin socket; for its own user and root.

        with Admin() as admin:
            admin.reload()

    ``path``: see admin_path(). ``timeout``: default of every call, in seconds; None waits, which a reload of a large
    model may need. Each method returns what the daemon tells of it; AdminFailed says why it could not do it.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, timeout: float | None = None,
                 connect_timeout: float = 5.0) -> None:
        self._client = Client(admin_path(path), timeout=timeout, connect_timeout=connect_timeout, retries=0,
                              reconnect=0)

    def close(self) -> None:
        """Idempotent."""
        self._client.close()

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()

    @property
    def path(self) -> str:
        """The admin socket."""
        return self._client.path

    def reload(self, everything: bool = False, *, timeout: float | None = None) -> dict[str, Any]:
        """Configuration and model anew, without dropping a request. Returns when the new ones serve: {generation,
        seconds}. ``everything``: dispatcher and KV pool are replaced too. If it fails, nothing has changed."""
        return self._ask(AdminReload, timeout, everything=everything)

    def drain(self, *, timeout: float | None = None) -> dict[str, Any]:
        """No new requests from now on; what is live goes on for the daemon's drain_seconds: {live}."""
        return self._ask(AdminDrain, timeout)

    def resume(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Takes a drain back."""
        return self._ask(AdminResume, timeout)

    def evict(self, uid: int | None = None, tenant: str | None = None, *,
              timeout: float | None = None) -> dict[str, Any]:
        """Drops what is cached of a user, of one tenant of a user, or of all: {slabs}, how many became free."""
        return self._ask(AdminEvict, timeout, uid=uid, tenant=tenant)

    def log_level(self, level: str, role: str | None = None, *, timeout: float | None = None) -> dict[str, Any]:
        """Least important messages that are logged: "debug", "info", "warning" or "error". ``role``: only by the
        "supervisor", "dispatcher", "kvpool", every "worker" or one, "worker 0": {processes}."""
        return self._ask(AdminLogLevel, timeout, level=level, role=role)

    def dump(self, *, timeout: float | None = None) -> dict[str, Any]:
        """What the dispatcher knows: dispatcher, health, generations, pools, workers, connections, queue, requests; and
        omitted, how many entries did not fit. For people and scripts of one version: the fields may change."""
        return self._ask(AdminDump, timeout)

    def _ask(self, kind: type[Message], timeout: float | None, **fields: Any) -> dict[str, Any]:
        try:
            message = kind.from_body({name: value for name, value in fields.items() if value is not None})
        except InvalidMessage as e:
            raise from_local(e) from None
        reply: AdminReply = self._client.ask(Question(message, AdminReply), timeout)
        result: dict[str, Any] = json.loads(reply.result or b"{}")
        if not reply.ok:
            raise AdminFailed(reply.error, result)
        return result
