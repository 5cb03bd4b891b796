"""What goes wrong, and as which error it is told: requests, connections, time."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from colibri_client import AsyncClient, errors
from colibri_protocol.errors import CODES, Code
from colibri_protocol.limits import PINGS_UNANSWERED
from colibri_protocol.messages import (
    Bye,
    Cancel,
    Error,
    Generate,
    Health,
    HealthReply,
    LimitInfo,
    Ping,
    Pong,
    Stats,
    StatsReply,
)
from fixtures.scripted_server import Peer, Server, oracle, serve, until

PROMPT = [1, 2, 3]


# ---- the tree ----


@pytest.mark.parametrize("code", Code)
def test_every_code_has_its_class(code: Code) -> None:
    cls = errors.BY_CODE[code]
    name = code.name.title().replace("_", "")
    assert cls is getattr(errors, name)
    assert cls.__name__ == name
    assert issubclass(cls, errors.FAMILIES[code // 100])
    assert CODES[code].when in (cls.__doc__ or "")


def test_a_code_of_a_later_version_is_one_of_its_family() -> None:
    error = errors.from_wire(Error(code=399, message="new"))
    assert type(error) is errors.Overloaded
    assert str(error) == "CODE_399: new"
    assert type(errors.from_wire(Error(code=999, message="new"))) is errors.RequestError


async def test_errors_of_the_server_are_typed(path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome()
        _, key = await peer.expect(Generate)
        peer.tokens(key, [4, 5], 0)
        peer.send(Error(code=Code.PROMPT_TOO_LONG, message="tokens has 3, at most 2", field="tokens", index=2, limit=2,
                        tokens_sent=2, retry_after_ms=1500), key)
        await peer.expect(Bye)

    async with Server(path, script), AsyncClient(path) as client:
        stream = client.generate(PROMPT)
        assert [await anext(stream), await anext(stream)] == [4, 5]
        with pytest.raises(errors.PromptTooLong, match="PROMPT_TOO_LONG: tokens has 3") as raised:
            await anext(stream)
        error = raised.value
        assert isinstance(error, errors.InvalidRequest)
        assert (error.code, error.name) == (202, "PROMPT_TOO_LONG")
        assert (error.field, error.index, error.limit) == ("tokens", 2, 2)
        assert (error.retryable, error.retry_after, error.tokens) == (False, 1.5, [4, 5])
        with pytest.raises(errors.PromptTooLong):
            _ = stream.result


async def test_what_is_wrong_here_is_not_sent(path: Path) -> None:
    async with Server(path, serve) as server, AsyncClient(path) as client:
        with pytest.raises(errors.InvalidArgument, match="temperature") as raised:
            client.generate(PROMPT, temperature=float("nan"))
        assert raised.value.field == "temperature"
        with pytest.raises(errors.PromptEmpty):
            await client.complete([])
        with pytest.raises(errors.InvalidArgument, match="frame limit is 1048576; give fewer tokens") as raised:
            await client.complete(bytes(1 << 20))
        assert raised.value.limit == 1 << 20
        assert (await client.complete(PROMPT, max_tokens=1)).finish_reason == "length"
        assert server.peers[0].count(Generate) == 1


async def test_questions_do_not_wait_for_room(path: Path) -> None:
    enough = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.welcome(limits=LimitInfo(frame=1 << 20, requests=1))
        _, output = await peer.expect(Generate)
        _, key = await peer.expect(Health)
        peer.send(HealthReply(live=True, ready=False, state="starting", progress=0.5), key)
        _, key = await peer.expect(Stats)
        peer.send(StatsReply(uptime_s=3.0, running=1), key)
        await enough.wait()
        peer.done(output)
        await peer.expect(Bye)

    async with Server(path, script), AsyncClient(path) as client:
        running = asyncio.ensure_future(client.complete(PROMPT))  # the only request that there is room for
        await asyncio.sleep(0)
        with pytest.raises(errors.TimeoutExceeded):
            await client.complete(PROMPT, timeout=0.02)
        assert (await client.health()).progress == 0.5
        assert (await client.stats()).running == 1
        enough.set()
        await running


# ---- no connection ----


async def failure(path: Path, **options: float) -> str:
    client = AsyncClient(path, **options)  # type: ignore[arg-type]
    with pytest.raises(errors.ConnectionFailed) as raised:
        await client.connect()
    await client.close()
    assert raised.value.path == str(path)
    assert str(raised.value).startswith(f"{path}: ")
    return str(raised.value)


async def test_no_socket(path: Path) -> None:
    assert "is the daemon running (colibrid serve)" in await failure(path)


async def test_nobody_listens(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert "start it again (colibrid serve)" in await failure(path)


async def test_not_a_daemons_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        assert "another type" in await failure(path)


async def test_a_path_that_cannot_be_a_socket(path: Path) -> None:
    assert "too long" in await failure(path.with_name("s" * 200))


async def test_no_permission(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the error itself: for root, who runs this in CI, no permission is missing."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert "join the group that owns the socket" in await failure(path)


async def test_an_accept_queue_that_stays_full(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))
        assert "too many connections are waiting" in await failure(path, connect_timeout=0.1)


async def test_no_welcome(path: Path) -> None:
    async def silent(peer: Peer) -> None:
        await peer.expect_gone()

    async with Server(path, silent):
        assert "no answer within 0.05 s" in await failure(path, connect_timeout=0.05)


async def test_closed_before_welcome(path: Path) -> None:
    async def closes(peer: Peer) -> None:
        await peer.next()

    async with Server(path, closes):
        assert "before it said WELCOME" in await failure(path)


async def test_refused_at_the_door(path: Path) -> None:
    async def refuses(peer: Peer) -> None:
        await peer.next()
        peer.send(Error(code=Code.PERMISSION, message="this user may not connect"))
        await peer.expect_gone()

    async with Server(path, refuses) as server:
        client = AsyncClient(path)
        with pytest.raises(errors.Permission, match="this user may not connect"):
            await client.connect()
        await client.close()
        assert len(server.peers) == 1


async def test_no_connection_to_spare_is_tried_again(path: Path, quick: Callable[..., AsyncClient]) -> None:
    async def full(peer: Peer) -> None:
        await peer.next()
        peer.send(Error(code=Code.TOO_MANY_CONNECTIONS, message="256 connections", retryable=True))
        await peer.expect_gone()

    async with Server(path, full, full, full, serve), quick() as client:
        assert (await client.complete(PROMPT, max_tokens=1)).finish_reason == "length"
    async with Server(path, full) as server:
        client = quick()
        with pytest.raises(errors.TooManyConnections):
            await client.connect()
        await client.close()
        assert len(server.peers) == 4


async def test_not_connected_yet(path: Path) -> None:
    client = AsyncClient(path)
    with pytest.raises(errors.ColibriError, match="with block"):
        _ = client.model


async def test_the_socket_from_the_environment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert AsyncClient(path).path == str(path)
    monkeypatch.setenv("COLIBRI_SOCKET", "/elsewhere")
    assert AsyncClient().path == "/elsewhere"
    monkeypatch.delenv("COLIBRI_SOCKET")
    assert AsyncClient().path == "/run/colibri/colibri.sock"


async def test_a_client_belongs_to_one_loop(path: Path) -> None:
    async with Server(path, serve), AsyncClient(path) as client:
        def elsewhere() -> None:
            asyncio.run(client.health())

        with pytest.raises(errors.ColibriError, match="another event loop"):
            await asyncio.to_thread(elsewhere)


# ---- time ----


async def test_timeout_cancels(path: Path) -> None:
    async def slow(peer: Peer) -> None:
        await peer.welcome()
        _, key = await peer.expect(Generate)
        peer.tokens(key, [1, 2], 0)
        await peer.expect(Cancel)
        peer.done(key, 2, "abort")
        await peer.expect(Bye)

    async with Server(path, slow), AsyncClient(path, timeout=10) as client:
        stream = client.generate(PROMPT, timeout=0.05)
        assert [await anext(stream), await anext(stream)] == [1, 2]
        with pytest.raises(errors.TimeoutExceeded, match=r"within 0.05 s") as raised:
            await anext(stream)
        assert raised.value.tokens == [1, 2]
        assert isinstance(raised.value, TimeoutError)


async def test_a_dead_server_is_noticed(path: Path, quick: Callable[..., AsyncClient]) -> None:
    """It does not answer pings while it owes an answer; the next connection goes on with the output."""

    async def dead(peer: Peer) -> None:
        await peer.welcome()
        _, key = await peer.expect(Generate)
        peer.tokens(key, oracle(PROMPT, 0, 2), 0)
        said = await peer.expect_gone()
        assert said == [Ping()] * PINGS_UNANSWERED

    async with Server(path, dead, serve) as server, quick(ping=0.02) as client:
        stream = client.generate(PROMPT, max_tokens=5)
        assert [token async for token in stream] == oracle(PROMPT, 0, 5)
        assert len(server.peers) == 2


async def test_a_quiet_server_that_answers_pings_is_left_alone(path: Path, quick: Callable[..., AsyncClient]) -> None:
    async def quiet(peer: Peer) -> None:
        await peer.welcome()
        _, key = await peer.expect(Generate)
        for _ in range(6):
            message, ping = await peer.next()
            peer.send(Pong(data=message.data), ping)
        peer.done(key)
        await peer.expect(Bye)

    async with Server(path, quiet), quick(ping=0.01) as client:
        assert (await client.complete(PROMPT)).finish_reason == "length"


async def test_pings_of_the_server_are_answered(path: Path) -> None:
    async def asks(peer: Peer) -> None:
        await peer.welcome()
        peer.send(Ping(data=b"there?"))
        message, _ = await peer.expect(Pong)
        assert message.data == b"there?"
        await peer.expect(Bye)

    async with Server(path, asks) as server, AsyncClient(path):
        await until(lambda: server.peers[0].count(Pong))
