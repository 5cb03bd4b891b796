"""What strangers may send to the gateway: the right status, bounded memory, and nobody else is affected."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from colibri_client import Client
from fixtures.daemon import Daemon
from fixtures.gateway import Gateway

MIB = 1 << 20
PATIENCE = 60


def post(
    gateway: Gateway, body: bytes | dict[str, Any], path: str = "/v1/completions", **headers: str
) -> tuple[int, Any]:
    """Status and JSON."""
    connection = http.client.HTTPConnection(gateway.address, timeout=PATIENCE)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def dial(gateway: Gateway) -> socket.socket:
    host, port = gateway.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def request(body: bytes, version: str = "1.1", path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def read_all(sock: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionResetError):  # what was sent and not read resets the connection after the answer
        while part := sock.recv(1 << 16):
            data += part
    return data


@pytest.fixture(autouse=True)
def unharmed(chat_gateway: Gateway) -> Iterator[None]:
    """After each test the gateway answers as ever."""
    yield
    assert post(chat_gateway, {"prompt": "a", "max_tokens": 2})[0] == 200
    assert not chat_gateway.log(msg="panic")


def test_a_header_of_100_mib(chat_gateway: Gateway) -> None:
    before = chat_gateway.resident()
    with dial(chat_gateway) as sock:
        sent = 0
        with suppress(ConnectionError):
            sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n")
            line = b"X-Long: " + b"a" * (MIB - 10) + b"\r\n"
            while sent < 100 * MIB:
                sock.sendall(line)
                sent += len(line)
        answer = b""
        with suppress(ConnectionError):
            answer = read_all(sock)
    assert sent < 100 * MIB, "all of it was taken"
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
    assert chat_gateway.resident() - before < 32 * MIB


def test_a_header_that_is_a_little_too_long(chat_gateway: Gateway) -> None:
    with dial(chat_gateway) as sock:
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 80_000)
        assert read_all(sock).startswith(b"HTTP/1.1 431 ")


def test_a_slow_body(gateway_binary: Path, chat_daemon: Daemon) -> None:
    with Gateway(gateway_binary, chat_daemon.socket, body_time="200ms") as gateway, dial(gateway) as sock:
        sock.sendall(request(b'{"prompt": "a"}')[:-5])
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"Connection: close" in answer
    assert b'"code":"body_timeout"' in answer


def test_a_body_that_is_cut_off(chat_gateway: Gateway) -> None:
    with dial(chat_gateway) as sock:
        sock.sendall(request(b'{"prompt": "a"}')[:-5])
        sock.shutdown(socket.SHUT_WR)
        assert b'"code":"incomplete_body"' in read_all(sock)


def test_a_prompt_of_1_mib(chat_gateway: Gateway) -> None:
    status, answer = post(chat_gateway, {"prompt": "word " * (MIB // 5)})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, answer = post(chat_gateway, {"prompt": [3] * (MIB // 4)})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_a_body_over_the_limit(chat_gateway: Gateway) -> None:
    before = chat_gateway.resident()
    with dial(chat_gateway) as sock:
        sock.sendall(request(b" " * 5 * MIB)[:MIB])
        answer = read_all(sock)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b'"code":"body_too_large"' in answer
    with dial(chat_gateway) as sock:  # of unknown length
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        with suppress(ConnectionError):
            for _ in range(200):
                sock.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        with suppress(ConnectionError):
            answer = read_all(sock)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 413 ")
    assert chat_gateway.resident() - before < 64 * MIB


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json", None),
        (b'{"prompt":"\xff\xfe"}', "invalid_json", None),
        (b'{"prompt":"\\ud800"}', "invalid_json", None),
        (b'{"prompt":"a","temperature":NaN}', "invalid_json", None),
        (b'{"prompt":"a","temperature":1e999}', "invalid_argument", "temperature"),
        (b'{"prompt":"a","prompt":"b"}', "invalid_json", None),
        (b'{"prompt":"a"}{"prompt":"b"}', "invalid_json", None),
        (b'{"prompt":"a","n":1000000000000000000000}', "invalid_argument", "n"),
        (b'{"prompt":"a","n":-1}', "invalid_argument", "n"),
        (b'{"prompt":"a","max_tokens":-5}', "invalid_argument", "max_tokens"),
        (b'{"prompt":"a","max_tokens":"many"}', "invalid_argument", "max_tokens"),
        (b'{"prompt":{"a":1}}', "invalid_argument", "prompt"),
        (b'{"prompt":[[1],[2.5]]}', "invalid_argument", "prompt[1][0]"),
        (b'{"prompt":[4294967296]}', "invalid_argument", "prompt[0]"),
        (b'{"prompt":[4294967295]}', "token_out_of_range", "prompt"),
        (b"null", "invalid_json", None),
        (b"", "invalid_json", None),
    ],
    ids=lambda value: value[:40].decode(errors="replace") if isinstance(value, bytes) else "",
)
def test_bodies(chat_gateway: Gateway, body: bytes, code: str, param: str | None) -> None:
    status, answer = post(chat_gateway, body)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, code, param)


def test_unknown_fields_are_ignored(chat_gateway: Gateway) -> None:
    assert post(chat_gateway, {"prompt": "a", "max_tokens": 1, "no_such": {"deep": [1]}, "user": "me"})[0] == 200


def test_http_1_0_and_nonsense(chat_gateway: Gateway) -> None:
    with dial(chat_gateway) as sock:
        sock.sendall(request(b'{"prompt":"a","max_tokens":3,"stream":true}', "1.0"))
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.0 200 OK")
    assert answer.endswith(b"data: [DONE]\n\n")
    for nonsense in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"\0" * 1000,
        b"GET / HTTP/9.9\r\n\r\n",
    ):
        with dial(chat_gateway) as sock:
            sock.sendall(nonsense)
            sock.shutdown(socket.SHUT_WR)
            answer = read_all(sock)
            assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4", b"HTTP/1.1 5"))


def test_pipelining(chat_gateway: Gateway) -> None:
    with dial(chat_gateway) as sock:
        sock.sendall(b"".join(request(b'{"prompt":"a","ignore_eos":true,"max_tokens":%d}' % n) for n in (3, 1, 2)))
        answers = sock.makefile("rb")
        for n in (3, 1, 2):
            length = 0
            while (line := answers.readline()) != b"\r\n":
                name, _, value = line.partition(b":")
                length = int(value) if name == b"Content-Length" else length
            assert json.loads(answers.read(length))["usage"]["completion_tokens"] == n
        answers.close()


@pytest.mark.parametrize("readers", [40, pytest.param(500, marks=pytest.mark.full)])
def test_streams_that_nobody_reads(gateway_binary: Path, chat_daemon: Daemon, readers: int) -> None:
    """They are given up after a while; until then they cost little, and others are served."""
    body = json.dumps(
        {"prompt": "a", "max_tokens": 100_000, "ignore_eos": True, "stream": True, "logprobs": 20}
    ).encode()
    with Gateway(gateway_binary, chat_daemon.socket, write_time="2s") as gateway, ExitStack() as stack:
        for _ in range(readers):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, port = gateway.address.rsplit(":", 1)
            sock.connect((host, int(port)))
            sock.sendall(request(body))
        most = 0
        answered = 0

        def given_up() -> bool:
            nonlocal most, answered
            most = max(most, gateway.resident())
            answered += post(gateway, {"prompt": "a", "max_tokens": 2})[0] == 200
            return len(gateway.log(msg="request", path="/v1/completions", error="client_too_slow")) + len(
                gateway.log(msg="request", status=429)) >= readers  # fmt: skip

        gateway.until(given_up)
        assert answered > 0
        assert most < 300 * MIB
        with Client(chat_daemon.socket) as client:
            chat_daemon.until(lambda: (s := client.stats()).running == s.waiting == 0 and not s.kv_slabs["live"])
