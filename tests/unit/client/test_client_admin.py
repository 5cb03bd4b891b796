"""The administrator's client: what it says, what it returns, what it raises."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from colibri_client import Admin, errors
from colibri_client.admin import admin_path
from colibri_protocol.message import Message
from colibri_protocol.messages import (
    AdminDrain,
    AdminDump,
    AdminEvict,
    AdminLogLevel,
    AdminReload,
    AdminReply,
    AdminResume,
    Ping,
)
from fixtures.scripted_server import Peer, Server


def answering(reply: AdminReply, heard: list[Message]) -> Callable[[Peer], Any]:
    async def script(peer: Peer) -> None:
        await peer.welcome()
        message, key = await peer.next()
        heard.append(message)
        peer.send(Ping())  # the connection is served meanwhile
        await peer.next()
        peer.send(reply, key)
        await peer.expect_gone()

    return script


async def ask(path: Path, reply: AdminReply, use: Callable[[Admin], Any]) -> tuple[Any, Message]:
    """What use() returned, and what the daemon heard."""
    heard: list[Message] = []

    def run() -> Any:
        with Admin(path) as admin:
            return use(admin)

    async with Server(path, answering(reply, heard)):
        found = await asyncio.to_thread(run)
    return found, heard[0]


@pytest.mark.parametrize(("use", "message"), [
    (lambda a: a.reload(), AdminReload()),
    (lambda a: a.reload(everything=True), AdminReload(everything=True)),
    (lambda a: a.drain(), AdminDrain()),
    (lambda a: a.resume(), AdminResume()),
    (lambda a: a.evict(), AdminEvict()),
    (lambda a: a.evict(5, "acme"), AdminEvict(uid=5, tenant="acme")),
    (lambda a: a.log_level("debug"), AdminLogLevel(level="debug")),
    (lambda a: a.log_level("info", role="worker 0"), AdminLogLevel(level="info", role="worker 0")),
    (lambda a: a.dump(), AdminDump()),
])  # fmt: skip
async def test_every_call(path: Path, use: Callable[[Admin], Any], message: Message) -> None:
    result = {"slabs": 7, "text": "kolibří"}
    reply = AdminReply(ok=True, result=json.dumps(result).encode())
    assert await ask(path, reply, use) == (result, message)


async def test_nothing_to_tell(path: Path) -> None:
    assert (await ask(path, AdminReply(ok=True), lambda a: a.resume()))[0] == {}


async def test_what_could_not_be_done(path: Path) -> None:
    reply = AdminReply(ok=False, error="model: is not set", result=b'{"generation": 1}')
    with pytest.raises(errors.AdminFailed, match="model: is not set") as raised:
        await ask(path, reply, lambda a: a.reload())
    assert raised.value.result == {"generation": 1}


async def test_a_field_that_is_wrong_is_not_sent(path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome()
        assert len(await peer.expect_gone()) == 1, "more than BYE"

    def use() -> None:
        with Admin(path) as admin:
            for call in (lambda: admin.evict(-1), lambda: admin.evict(1, "x" * 200), lambda: admin.log_level("x" * 20)):
                with pytest.raises(errors.InvalidRequest):
                    call()

    async with Server(path, script):
        await asyncio.to_thread(use)


async def test_a_lost_connection_is_an_error_at_once(path: Path) -> None:
    """An order must not be given twice."""
    async def script(peer: Peer) -> None:
        await peer.welcome()
        await peer.next()
        peer.abort()

    def use() -> None:
        with Admin(path) as admin, pytest.raises(errors.ConnectionLost):
            admin.drain()

    async with Server(path, script) as server:
        await asyncio.to_thread(use)
        assert len(server.peers) == 1


def test_where_the_socket_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLIBRI_SOCKET", "COLIBRI_ADMIN_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    assert admin_path() == "/run/colibri/colibri.sock.admin"
    assert admin_path(socket="/tmp/s") == "/tmp/s.admin"
    monkeypatch.setenv("COLIBRI_SOCKET", "/tmp/t")
    assert admin_path() == "/tmp/t.admin"
    monkeypatch.setenv("COLIBRI_ADMIN_SOCKET", "/tmp/a")
    assert admin_path() == "/tmp/a"
    assert admin_path("/tmp/b") == "/tmp/b"
