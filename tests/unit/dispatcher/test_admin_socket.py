"""The admin socket: who may use it, what each message does, and what the client socket does with them."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import msgpack
import pytest
from colibri_daemon.common import pool_ipc
from colibri_daemon.common.kv import OWNER_BYTES
from colibri_daemon.dispatcher.admin import CONNECTIONS, HANDLERS
from colibri_daemon.dispatcher.admission import owner_of, salt_of
from colibri_daemon.dispatcher.dump import shortened
from colibri_daemon.dispatcher.session import Peer
from colibri_protocol.errors import Code
from colibri_protocol.message import MESSAGES, SERVER, Message
from colibri_protocol.messages import (
    AdminDrain,
    AdminDump,
    AdminEvict,
    AdminLogLevel,
    AdminReload,
    AdminReply,
    AdminResume,
    Done,
    Error,
    GoAway,
    Health,
    HealthReply,
    Hello,
    Ping,
    Pong,
    Stats,
    StatsReply,
    TokensOut,
    Welcome,
)
from dispatched import SECONDS, Client, Rig, generate, ids, on_uvloop, rig, score, three, until

ADMIN = (AdminDrain(), AdminResume(), AdminReload(), AdminEvict(), AdminLogLevel(level="debug"), AdminDump())


def test_every_message_of_a_client_has_a_handler() -> None:
    assert set(HANDLERS) == {message for message in MESSAGES.values() if message.SENDER != SERVER}


async def admin(r: Rig) -> Client:
    client = await r.dial(r.admin_path)
    await client.say(Hello(proto_min=1, proto_max=1))
    await client.hear_a(Welcome)
    return client


async def does(client: Client, message: Message, request_id: int = 9) -> dict[str, Any]:
    """The result."""
    await client.say(message, request_id)
    reply = await client.hear_a(AdminReply, request_id)
    assert (reply.ok, reply.error) == (True, "")
    return json.loads(reply.result)


async def fails(client: Client, message: Message, request_id: int = 9) -> str:
    await client.say(message, request_id)
    reply = await client.hear_a(AdminReply, request_id)
    assert not reply.ok
    return reply.error


async def asked(r: Rig) -> dict[str, Any]:
    """The next "admin" message to the supervisor."""
    while True:
        packet = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(r.control, 4096), SECONDS)
        message = msgpack.unpackb(packet)
        if message["t"] == "admin":
            return message


async def health(client: Client) -> HealthReply:
    await client.say(Health())
    return await client.hear_a(HealthReply)


# ---- who and what --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", ADMIN, ids=lambda message: message.NAME)
@on_uvloop
async def test_the_client_socket_refuses_administration(message: Message) -> None:
    async with rig() as r:
        client = await r.client()
        assert (await client.refused(message, 4)).code == Code.PERMISSION
        await client.say(Ping())
        await client.hear_a(Pong)
        assert not r.requests.draining


@pytest.mark.parametrize("message", [generate(), score()], ids=lambda message: message.NAME)
@on_uvloop
async def test_the_admin_socket_refuses_requests(message: Message) -> None:
    async with rig() as r:
        client = await admin(r)
        assert (await client.refused(message, 4)).code == Code.PERMISSION
        assert (await health(client)).live
        await client.say(Stats())
        await client.hear_a(StatsReply)


@on_uvloop
async def test_an_id_is_needed() -> None:
    async with rig() as r:
        client = await admin(r)
        client.conn.sides.clear()  # else it would not let us
        await client.raw(b"\0\0\0\4\x93\x25\0\x80")
        data = await asyncio.get_running_loop().sock_recv(client.sock, 4096)
        assert b"needs a request id" in data
        assert await asyncio.get_running_loop().sock_recv(client.sock, 4096) == b""


@on_uvloop
async def test_other_users_may_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as r:
        monkeypatch.setattr("colibri_daemon.dispatcher.admin.os.geteuid", lambda: 4711)
        monkeypatch.setattr("colibri_daemon.dispatcher.server.peer_of", lambda sock: Peer(1, 4712, 4712))
        refused = await r.dial(r.admin_path)
        error = await refused.hear_a(Error)
        assert (error.code, "only root and user" in error.message) == (Code.PERMISSION, True)
        await refused.closed()
        monkeypatch.undo()
        assert await does(await admin(r), AdminDump())


@on_uvloop
async def test_connections_are_bounded_and_not_counted_among_the_clients() -> None:
    async with rig(connections=1) as r:
        admins = [await admin(r) for _ in range(CONNECTIONS)]
        assert (await (await r.dial(r.admin_path)).hear_a(Error)).code == Code.TOO_MANY_CONNECTIONS
        assert (await (await r.client()).stats()).connections == 1
        admins[0].sock.close()
        await until(lambda: len(r.dispatcher.admin.sessions) < CONNECTIONS)
        await admin(r)


# ---- drain and resume ----------------------------------------------------------------------------------------------


@on_uvloop
async def test_drain_and_resume() -> None:
    """New requests are refused, live ones finish, the supervisor is not told that all is over, and then as before."""
    async with rig() as r:
        worker, client, _ = await three(r)
        await r.told()
        root = await admin(r)
        await client.say(generate(), 1)
        key, _ = await worker.assigned()
        assert await does(root, AdminDrain()) == {"live": 1}
        assert (await client.hear_a(GoAway)).reason == "drain"
        told = await health(client)
        assert (told.ready, told.state, "administrator" in told.reason) == (False, "draining", True)
        late = await r.dial()
        await late.say(Hello(proto_min=1, proto_max=1))
        await late.hear_a(Welcome)
        await late.hear_a(GoAway)
        await worker.step([key, ids(8), {"finish": "stop", "generated": 1}])
        await client.hear_a(TokensOut, 1)
        await client.hear_a(Done, 1)
        assert await does(root, AdminDrain()) == {"live": 0}
        r.dispatcher._look_around(r.dispatcher._clock())
        assert not r.told_already()

        assert await does(root, AdminResume()) == {}
        assert (await health(client)).state != "draining"
        fresh = await r.client()
        await fresh.say(generate(), 1)
        await worker.assigned()
        assert await does(root, AdminResume()) == {}


@on_uvloop
async def test_what_is_left_after_drain_seconds_ends() -> None:
    async with rig(drain_seconds=0) as r:
        _, client, _ = await three(r)
        await client.say(generate(), 1)
        await does(await admin(r), AdminDrain())
        await client.hear_a(GoAway)
        assert (await client.hear_a(Error, 1)).code == Code.DRAINING


@on_uvloop
async def test_a_daemon_that_stops_is_not_resumed() -> None:
    async with rig() as r:
        root = await admin(r)
        await does(root, AdminDrain())
        r.tell({"t": "drain", "seconds": 100})
        await until(lambda: not r.dispatcher._by_hand)
        assert "stopping" in await fails(root, AdminResume())
        assert r.requests.draining


# ---- what the supervisor does --------------------------------------------------------------------------------------


@on_uvloop
async def test_a_reload_is_answered_when_it_has_ended() -> None:
    async with rig() as r:
        root, other = await admin(r), await admin(r)
        await root.say(AdminReload(), 3)
        first = await asked(r)
        await other.say(AdminReload(everything=True), 3)
        second = await asked(r)
        assert (first["do"], first["everything"], second["everything"]) == ("reload", False, True)
        r.tell({"t": "admin", "id": second["id"], "ok": False, "error": "model: is not set", "result": {}})
        reply = await other.hear_a(AdminReply, 3)
        assert (reply.ok, reply.error) == (False, "model: is not set")
        await root.say(Ping())  # is served meanwhile
        await root.hear_a(Pong)
        r.tell({"t": "admin", "id": first["id"], "ok": True, "error": "", "result": {"generation": 2}})
        reply = await root.hear_a(AdminReply, 3)
        assert (reply.ok, json.loads(reply.result)) == (True, {"generation": 2})


@on_uvloop
async def test_an_answer_to_somebody_who_has_left() -> None:
    async with rig() as r:
        root = await admin(r)
        await root.say(AdminReload(), 3)
        number = (await asked(r))["id"]
        root.sock.close()
        await until(lambda: not r.dispatcher.admin.sessions)
        for _ in range(2):
            r.tell({"t": "admin", "id": number, "ok": True, "error": "", "result": {}})
        assert await does(await admin(r), AdminDump())


@on_uvloop
async def test_the_log_level_goes_by_the_supervisor() -> None:
    async with rig() as r:
        root = await admin(r)
        await root.say(AdminLogLevel(level="debug", role="worker"), 3)
        message = await asked(r)
        assert {"do": "log_level", "level": "debug", "role": "worker"}.items() <= message.items()
        r.tell({"t": "admin", "id": message["id"], "ok": True, "error": "", "result": {}})
        assert (await root.hear_a(AdminReply, 3)).ok
        error = await root.refused(AdminLogLevel(level="loud"), 4)
        assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "level")


# ---- eviction ------------------------------------------------------------------------------------------------------


@on_uvloop
async def test_evict() -> None:
    async with rig() as r:
        pool, root = await r.pool(), await admin(r)
        for message, owner in ((AdminEvict(), None), (AdminEvict(uid=5), owner_of(5, None)),
                               (AdminEvict(uid=5, tenant="x"), owner_of(5, "x"))):
            await root.say(message, 3)
            tag, number, told = await pool.hear()
            assert (tag, told) == (pool_ipc.EVICT, owner)
            await pool.say(pool_ipc.EVICTED, number, 7)
            assert json.loads((await root.hear_a(AdminReply, 3)).result) == {"slabs": 7}
        error = await root.refused(AdminEvict(tenant="x"), 4)
        assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "uid")


@on_uvloop
async def test_evict_without_a_pool() -> None:
    async with rig() as r:
        root = await admin(r)
        assert "does not answer" in await fails(root, AdminEvict())
        pool = await r.pool()
        await root.say(AdminEvict(), 3)
        await pool.hear()
        pool.die()
        assert not (await root.hear_a(AdminReply, 3)).ok


def test_a_salt_begins_with_its_owner() -> None:
    salts = {salt_of(uid, tenant, extra) for uid in (1, 2) for tenant in (None, "", "a") for extra in (b"", b"x")}
    assert len(salts) == 12
    for tenant in (None, "", "a"):
        for extra in (b"", b"x"):
            assert salt_of(1, tenant, extra)[:OWNER_BYTES] == owner_of(1, tenant)
    assert len({owner_of(uid, tenant) for uid in (1, 2) for tenant in (None, "", "a")}) == 6
    assert salt_of(65534, None, b"") == b""


# ---- the dump ------------------------------------------------------------------------------------------------------


@on_uvloop
async def test_dump_tells_everything_but_tokens() -> None:
    async with rig(max_frame=1 << 20) as r:
        worker = await r.worker(max_seqs=1)
        client, root = await r.client(), await admin(r)
        await r.pool(free=60)
        await client.say(generate(77, 78, 79, priority=3, trace="00-1"), 21)
        key, _ = await worker.assigned()
        await worker.step([key, ids(76), {"cached": 0}])
        await client.hear_a(TokensOut, 21)
        await client.say(generate(77, 78), 22)
        await until(lambda: len(r.requests.live) == 2)
        found = await does(root, AdminDump())
        running, queued = found["requests"]
        assert (running["id"], running["phase"], running["worker"], running["generated"]) == (21, "running", 0, 1)
        assert (running["prompt"], running["priority"], running["trace"]) == (3, 3, "00-1")
        assert (queued["phase"], queued["worker"], queued["generated"]) == ("queued", None, 0)
        assert found["queue"] == [{"uid": os.getuid(), "tenant": None, "requests": 1, "tokens": 2}]
        (connection,) = found["connections"]
        assert (connection["uid"], connection["pid"], connection["requests"]) == (os.getuid(), os.getpid(), 2)
        assert [(w["slot"], w["running"]) for w in found["workers"]] == [(0, 1)]
        assert found["pools"][0]["slabs"]["free"] == 60
        assert (found["dispatcher"]["draining"], found["omitted"]) == (False, 0)
        assert not {"77", "78", "79", "76"} & set(json.dumps(found["requests"]).replace(",", " ").split())


def test_a_dump_that_is_too_long_says_how_much_it_leaves_out() -> None:
    result = {"requests": list(range(1000)), "few": [1, 2], "omitted": 5, "text": "x"}
    for most in (100, 500, 5000):
        text = shortened(result, most)
        kept = json.loads(text)
        assert len(text) <= most
        assert kept["requests"] == list(range(len(kept["requests"])))
        assert kept["omitted"] == 5 + 1000 - len(kept["requests"])
        assert (kept["few"], kept["text"]) == ([1, 2], "x")
