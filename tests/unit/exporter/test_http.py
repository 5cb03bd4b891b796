"""The HTTP server on real sockets: what clients ask in one way or another, and what bad ones do."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from colibri_daemon.exporter import http
from colibri_daemon.exporter.http import Answer, HttpServer

LARGE = b"x 1\n" * 500_000


def fail() -> Answer:
    raise RuntimeError("on purpose")


ROUTES = {"/metrics": lambda: Answer(200, b"a 1\n", "text/special"), "/large": lambda: Answer(200, LARGE),
          "/no": lambda: Answer(503, b"no\n"), "/fault": fail}  # fmt: skip


class Client:
    """Bytes out, whole answers in. port: of the server."""

    def __init__(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.port, self._reader, self.writer = port, reader, writer

    @classmethod
    async def connect(cls, port: int) -> Client:
        return cls(port, *await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, data: bytes, head: bool = False) -> tuple[int, dict[bytes, bytes], bytes]:
        """Sends it and reads one answer."""
        self.writer.write(data)
        return await self.answer(head)

    async def answer(self, head: bool = False) -> tuple[int, dict[bytes, bytes], bytes]:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines[1:] if line)}
        size = 0 if head else int(headers[b"content-length"])
        return int(lines[0].split()[1]), headers, await self._reader.readexactly(size)

    async def closed(self) -> bool:
        """Waits for the server to close."""
        try:
            return await self._reader.read() == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.writer.close()


@asynccontextmanager
async def serving() -> AsyncIterator[Client]:
    server = await asyncio.get_running_loop().create_server(HttpServer(ROUTES).connection, "127.0.0.1", 0)
    client = await Client.connect(server.sockets[0].getsockname()[1])
    try:
        yield client
    finally:
        client.close()
        server.close()


def get(path: str = "/metrics", *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


async def test_get_and_again_on_the_same_connection() -> None:
    async with serving() as client:
        for _ in range(3):
            status, headers, body = await client.ask(get("/metrics?a=b"))
            assert (status, body, headers[b"content-type"]) == (200, b"a 1\n", b"text/special")
            assert headers[b"date"].endswith(b"GMT")


@pytest.mark.parametrize(("request_", "status"), [
    (get("/"), 404), (get("/no"), 503), (get("/fault"), 500), (get(method="POST"), 405), (get(method="DELETE"), 405),
    (get("/metrics", "Content-Length: 3") + b"abc", 200),
])
async def test_other_answers_leave_the_connection_alive(request_: bytes, status: int) -> None:
    async with serving() as client:
        assert (await client.ask(request_))[0] == status
        assert (await client.ask(get()))[0] == 200


async def test_head_has_everything_but_the_body() -> None:
    async with serving() as client:
        status, headers, _ = await client.ask(get(method="HEAD"), head=True)
        assert (status, headers[b"content-length"]) == (200, b"4")
        assert (await client.ask(get()))[2] == b"a 1\n"


@pytest.mark.parametrize(("accepted", "packed"), [
    ("gzip", True), ("deflate, GZIP;q=0.8", True), ("identity", False), ("gzip;q=0", False), ("gzip;q=0.0", False),
    ("x-gzip", False), ("", False),
])
async def test_gzip_if_asked(accepted: str, packed: bool) -> None:
    async with serving() as client:
        _, headers, body = await client.ask(get("/metrics", f"Accept-Encoding: {accepted}"))
        assert (headers.get(b"content-encoding") == b"gzip") == packed
        assert (gzip.decompress(body) if packed else body) == b"a 1\n"


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as client:
        client.writer.write(get() + get("/no") + get())
        assert [(await client.answer())[0] for _ in range(3)] == [200, 503, 200]


async def test_byte_by_byte() -> None:
    async with serving() as client:
        for byte in get():
            client.writer.write(bytes([byte]))
            await client.writer.drain()
            await asyncio.sleep(0)
        assert (await client.answer())[0] == 200


async def test_connection_close_and_http_1_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server closes at once, not when its patience ends."""
    monkeypatch.setattr(http, "REQUEST_SECONDS", 3600)
    for request_ in (get("/metrics", "Connection: close"), b"GET /metrics HTTP/1.0\r\n\r\n"):
        async with serving() as client:
            assert (await client.ask(request_))[0] == 200
            assert await client.closed()


async def test_a_client_that_has_shut_its_side_is_answered() -> None:
    async with serving() as client:
        client.writer.write(get())
        client.writer.write_eof()
        assert (await client.answer())[0] == 200
        assert await client.closed()


@pytest.mark.parametrize(("data", "status"), [
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 4 + b"\r\n\r\n", 400),  # TLS
    (b"GET /metrics HTTP/1.1\r\n\r\n", 400),  # no Host
    (get("/metrics", "Transfer-Encoding: chunked") + b"zz\r\n", 400),
    (get("/metrics", "Expect: 100-continue", "Content-Length: 5"), 417),
    (get("/metrics", f"Content-Length: {http.MOST_BODY + 1}") + bytes(http.MOST_BODY + 1), 413),
    (b"GET /" + b"a" * 3 * http.MOST_HEAD, 431),
])
async def test_what_makes_no_sense_ends_the_connection(data: bytes, status: int) -> None:
    async with serving() as client:
        assert (await client.ask(data))[0] == status
        assert await client.closed()


async def test_too_many_connections_close_the_one_idle_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MOST_CONNECTIONS", 3)
    async with serving() as first:
        others = [await Client.connect(first.port) for _ in range(2)]
        for client in (*others, first):  # so first was used last
            assert (await client.ask(get()))[0] == 200
        late = await Client.connect(first.port)
        assert (await late.ask(get()))[0] == 200
        assert await others[0].closed()
        for client in (others[1], first, late):
            assert (await client.ask(get()))[0] == 200
            client.close()
        others[0].close()


@pytest.mark.parametrize("said", [b"", b"GET /met"])
async def test_whoever_does_not_ask_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.05)
    async with serving() as client:
        client.writer.write(said)
        assert await client.closed()


async def test_between_requests_there_is_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.05)
    async with serving() as client:
        assert (await client.ask(get()))[0] == 200
        assert await client.closed()


async def test_whoever_does_not_read_gets_no_more_and_then_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.5)
    async with serving() as client:
        for _ in range(20):
            client.writer.write(get("/large"))
        assert (await (other := await Client.connect(client.port)).ask(get()))[0] == 200
        other.close()
        await asyncio.sleep(0.6)  # it reads nothing in this time: the limit is what is tested
        received = 0
        try:
            while data := await client._reader.read(1 << 20):
                received += len(data)
        except ConnectionResetError:
            pass
        assert received < 20 * len(LARGE)

