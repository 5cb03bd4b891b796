"""Messages between our own processes: framing of the link, packets and descriptors of control sockets."""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgpack
import pytest
from colibri_daemon.common import ipc
from fixtures.descriptors import descriptors
from hypothesis import given
from hypothesis import strategies as st

Pair = tuple[socket.socket, socket.socket]

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 1 << 32), inner, max_size=4),
    max_leaves=6,
)  # fmt: skip


def split(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    at = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    yield from (data[a:b] for a, b in zip(at, at[1:], strict=False))


@pytest.fixture
def control() -> Iterator[Pair]:
    with ExitStack() as stack:
        left, right = (stack.enter_context(end) for end in ipc.control())
        yield left, right


# ---- link ----------------------------------------------------------------------------------------------------------
@given(messages=st.lists(VALUES, max_size=5), cuts=st.lists(st.integers(0, 1 << 16), max_size=20))
def test_any_split_gives_the_same_messages(messages: list[Any], cuts: list[int]) -> None:
    unframer = ipc.Unframer()
    stream = b"".join(map(ipc.pack, messages))
    assert [message for part in split(stream, cuts) for message in unframer.feed(part)] == messages


def test_a_message_comes_as_soon_as_it_is_whole() -> None:
    unframer, data = ipc.Unframer(), ipc.pack([1, b"x" * 1000])
    assert list(unframer.feed(data[:-1])) == []
    assert list(unframer.feed(data[-1:] + data[:3])) == [[1, b"x" * 1000]]
    assert list(unframer.feed(data[3:])) == [[1, b"x" * 1000]]


def test_an_announced_size_is_refused_before_it_comes() -> None:
    unframer = ipc.Unframer()
    assert list(unframer.feed((ipc.MAX_MESSAGE).to_bytes(4, "big"))) == []
    with pytest.raises(ValueError, match=str(ipc.MAX_MESSAGE + 1)):
        list(ipc.Unframer().feed((ipc.MAX_MESSAGE + 1).to_bytes(4, "big")))


def test_what_came_before_a_bad_message_is_given() -> None:
    messages = ipc.Unframer().feed(ipc.pack(1) + b"\0\0\0\1\xc1" + ipc.pack(2))
    assert next(messages) == 1
    with pytest.raises(ValueError, match="1 bytes between processes are no message"):
        next(messages)


@given(st.binary(max_size=64))
def test_any_payload_is_a_message_or_a_value_error(payload: bytes) -> None:
    try:
        (message,) = ipc.Unframer().feed(len(payload).to_bytes(4, "big") + payload)
    except ValueError:
        return
    assert ipc.pack(message)  # what was understood can be said


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x81\x90\x00", b"\x01\x02", b"\xa1\xff", b"\x91" * 2000])
def test_payloads_that_are_no_message(payload: bytes) -> None:
    """Empty, the reserved byte, a list as a key, two values, text that is no UTF-8, nesting."""
    with pytest.raises(ValueError, match=f"{len(payload)} bytes between processes are no message"):
        list(ipc.Unframer().feed(len(payload).to_bytes(4, "big") + payload))


def test_a_link_is_a_non_blocking_stream() -> None:
    left, right = ipc.link()
    with left, right:
        with pytest.raises(BlockingIOError):
            left.recv(1)
        with pytest.raises(BlockingIOError):
            deque(iter(lambda: left.send(bytes(1 << 16)), 0))
        assert right.type == socket.SOCK_STREAM


# ---- control -------------------------------------------------------------------------------------------------------
@given(message=st.dictionaries(st.text(), VALUES))
def test_a_packet_comes_as_it_was_sent(message: dict[str, Any]) -> None:
    left, right = ipc.control()
    with left, right:
        assert ipc.send_control(left, message)
        assert ipc.receive_control(right) == (message, [])


def test_packets_keep_their_borders(control: Pair) -> None:
    left, right = control
    for n in range(3):
        assert ipc.send_control(left, {"t": "state", "n": n})
    assert [ipc.receive_control(right) for _ in range(3)] == [({"t": "state", "n": n}, []) for n in range(3)]
    with pytest.raises(BlockingIOError):
        ipc.receive_control(right)


def test_end_of_file(control: Pair) -> None:
    left, right = control
    ipc.send_control(left, {"t": "ready"})
    left.close()
    assert ipc.receive_control(right) == ({"t": "ready"}, [])
    assert ipc.receive_control(right) is None
    assert not ipc.send_control(right, {"t": "drain"})


def test_a_peer_that_does_not_read(control: Pair) -> None:
    left, right = control
    sent = 0
    while ipc.send_control(left, {"t": "state", "fill": "x" * 10_000}):
        sent += 1
    assert sent > 0
    for _ in range(sent):
        assert ipc.receive_control(right) is not None
    assert ipc.send_control(left, {"t": "state"})


@pytest.mark.parametrize("count", [1, 3, ipc.MAX_FDS])
def test_descriptors_are_passed(control: Pair, count: int) -> None:
    """They are new ones for the same files, are not inherited by programs, and belong to the receiver."""
    left, right = control
    reader, writer = os.pipe()
    before = descriptors()
    assert ipc.send_control(left, {"t": "worker"}, (writer,) * count)
    received = ipc.receive_control(right)
    assert received is not None
    message, fds = received
    assert message == {"t": "worker"}
    assert len(set(fds) | {writer}) == count + 1
    for fd in fds:
        assert not os.get_inheritable(fd)
        os.write(fd, b"x")
        os.close(fd)
    assert os.read(reader, 100) == b"x" * count
    os.close(reader)
    os.close(writer)
    assert len(descriptors()) == len(before) - 2


@pytest.mark.parametrize(("data", "count"), [
    pytest.param(msgpack.packb({"t": "x" * ipc.MAX_PACKET}), 2, id="too long"),
    pytest.param(msgpack.packb({"t": "worker"}), ipc.MAX_FDS + 1, id="a descriptor too many"),
    pytest.param(msgpack.packb({"t": "worker"}), 100, id="many descriptors"),
    pytest.param(msgpack.packb({"t": "worker"})[:-1], 1, id="cut"),
    pytest.param(msgpack.packb(["worker"]), 1, id="no map"),
    pytest.param(b"\xc1", 3, id="no msgpack"),
    pytest.param(b"\x81\x90\x00", 1, id="a list as a key"),
])  # fmt: skip
def test_a_bad_packet_leaves_no_descriptor(control: Pair, data: bytes, count: int) -> None:
    left, right = control
    before = descriptors()
    socket.send_fds(left, [data], [0] * count)
    with pytest.raises(ValueError, match="packet|no message"):
        ipc.receive_control(right)
    assert descriptors() == before
    assert ipc.send_control(left, {"t": "ready"})  # the socket goes on
    assert ipc.receive_control(right) == ({"t": "ready"}, [])


def test_the_longest_packet(control: Pair) -> None:
    left, right = control
    message = {"t": "x" * (ipc.MAX_PACKET - 6)}
    assert len(msgpack.packb(message)) == ipc.MAX_PACKET
    assert ipc.send_control(left, message)
    assert ipc.receive_control(right) == (message, [])


def test_descriptors_that_are_none_are_not_sent(control: Pair) -> None:
    left, right = control
    assert not ipc.send_control(left, {"t": "worker"}, (1 << 20,))
    with pytest.raises(BlockingIOError) as nothing:
        ipc.receive_control(right)
    assert nothing.value.errno == errno.EAGAIN
