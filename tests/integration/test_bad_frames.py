"""Byte streams that no client of ours sends: answered and closed, without memory and without anybody else noticing."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from colibri_client import Client
from colibri_protocol.errors import Code
from fixtures.daemon import Daemon
from fixtures.models import Models

GROWTH = 5 << 20  # bytes of PSS


@pytest.fixture(scope="module")
def daemon(models: Models) -> Iterator[Daemon]:
    with Daemon(models.tiny("q4")) as running:
        yield running


def framed(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


HELLO = framed(msgpack.packb([1, 0, {"proto_min": 1, "proto_max": 1}]))
BOMB = b"\xdc\xff\xff" * (70_000 // 3)  # array16 in array16 in ...
DEEP = b"\x91" * 1000 + b"\xc0"
WIDE = b"\xdc\x10\x00" + b"\xdc\x10\x00" * 9  # nested arrays that announce 4096 entries each

BAD = {
    "length 0": (struct.pack(">I", 0), Code.PROTOCOL),
    "length over the limit": (struct.pack(">I", (1 << 20) + 1), Code.FRAME_TOO_LARGE),
    "length 2^32-1": (struct.pack(">I", 0xFFFFFFFF), Code.FRAME_TOO_LARGE),
    "nested array16 headers": (framed(BOMB), Code.PROTOCOL),
    "array32 of 2^32-1": (framed(b"\x93\x03\x01\xdd\xff\xff\xff\xff"), Code.PROTOCOL),
    "map32 of 2^32-1": (framed(b"\x93\x03\x01\xdf\xff\xff\xff\xff"), Code.PROTOCOL),
    "bin32 of 2^32-1": (framed(b"\x93\x03\x01\xc6\xff\xff\xff\xff"), Code.PROTOCOL),
    "a thousand levels": (framed(DEEP), Code.PROTOCOL),
    "wide and deep": (framed(WIDE), Code.PROTOCOL),
    "ext": (framed(b"\x93\x03\x01\xc7\x00\x05"), Code.PROTOCOL),
    "fixext": (framed(b"\x93\x03\x01\xd4\x01\x00"), Code.PROTOCOL),
    "reserved byte": (framed(b"\x93\x03\x01\xc1"), Code.PROTOCOL),
    "bytes after the message": (framed(msgpack.packb([10, 0, {}]) + b"\x00"), Code.PROTOCOL),
    "not an array": (framed(msgpack.packb({"tag": 3})), Code.PROTOCOL),
    "negative id": (framed(msgpack.packb([3, -1, {}])), Code.PROTOCOL),
    "a message of the server": (framed(msgpack.packb([6, 1, {"finish_reason": "stop"}])), Code.PROTOCOL),
    "HELLO again": (HELLO, Code.PROTOCOL),
    "GENERATE with id 0": (framed(msgpack.packb([3, 0, {"tokens": [1]}])), Code.PROTOCOL),
}


def connect(daemon: Daemon) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(30)
    raw.connect(str(daemon.socket))
    return raw


def answers(raw: socket.socket) -> list[tuple[int, int, dict]]:
    """Everything until the daemon closes."""
    data = b""
    try:
        while piece := raw.recv(65536):
            data += piece
    except ConnectionResetError:  # it closed with our bytes unread; what it said before has arrived
        pass
    found = []
    while data:
        (size,) = struct.unpack_from(">I", data)
        found.append(tuple(msgpack.unpackb(data[4 : 4 + size])))
        data = data[4 + size :]
    return found


def pss(daemon: Daemon) -> int:
    """Of the dispatcher, in bytes."""
    rollup = Path(f"/proc/{daemon.pid_of('dispatcher')}/smaps_rollup").read_text()
    return 1024 * int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1])


@pytest.mark.parametrize("name", BAD)
def test_bad_frame(daemon: Daemon, name: str) -> None:
    frame, code = BAD[name]
    with connect(daemon) as raw, Client(daemon.socket) as neighbour:
        stream = neighbour.generate([3, 4, 5], max_tokens=20, ignore_eos=True)
        first = next(stream)
        raw.sendall(HELLO + frame)
        *_, (tag, id, body) = answers(raw)
        assert (tag, id, body["code"]) == (7, 0, code)
        assert len([first, *stream]) == 20


def test_no_hello(daemon: Daemon) -> None:
    with connect(daemon) as raw:
        raw.sendall(framed(msgpack.packb([3, 1, {"tokens": [1]}])))
        assert [(tag, body["code"]) for tag, _, body in answers(raw)] == [(7, Code.PROTOCOL)]


def test_no_common_version(daemon: Daemon) -> None:
    with connect(daemon) as raw:
        raw.sendall(framed(msgpack.packb([1, 0, {"proto_min": 7, "proto_max": 9}])))
        assert [(tag, body["code"]) for tag, _, body in answers(raw)] == [(7, Code.VERSION)]


def test_bombs_cost_no_memory(daemon: Daemon) -> None:
    """Fifty of each at once, and random bytes, half of them with a valid length before."""
    rng = random.Random(5)
    with connect(daemon) as warm:
        warm.sendall(HELLO + BAD["nested array16 headers"][0])
        answers(warm)
    before = pss(daemon)
    for frame in [frame for frame, _ in BAD.values()] + [_noise(rng, i % 2 == 0) for i in range(40)]:
        crowd = [connect(daemon) for _ in range(50)]
        for raw in crowd:
            raw.sendall(HELLO + frame)
        for raw in crowd:
            raw.shutdown(socket.SHUT_WR)
            answers(raw)
            raw.close()
    assert pss(daemon) - before < GROWTH
    with Client(daemon.socket) as client:
        assert len(list(client.generate([1, 2], max_tokens=4, ignore_eos=True))) == 4


def _noise(rng: random.Random, valid_length: bool) -> bytes:
    noise = rng.randbytes(rng.randrange(1, 2000))
    return framed(noise) if valid_length else noise


def test_half_a_frame_then_silence(models: Models) -> None:
    """The rest of a started frame must come in time; the daemon's own limit is ten seconds."""
    with Daemon(models.tiny("q4")) as daemon, connect(daemon) as raw:
        raw.sendall(HELLO + struct.pack(">I", 1000) + b"\x93\x03")
        *_, (tag, id, body) = answers(raw)
        assert (tag, id, body["code"]) == (7, 0, Code.READ_TIMEOUT)
