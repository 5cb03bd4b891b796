"""Cutting a byte stream into frames."""

from __future__ import annotations

import tracemalloc

import pytest
from colibri_protocol.errors import Code, ConnectionFault
from colibri_protocol.framing import Framer, frame
from hypothesis import given
from hypothesis import strategies as st

LIMIT = 300
payloads = st.lists(st.binary(min_size=1, max_size=LIMIT), max_size=8)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """data cut at these places."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in zip(places, places[1:], strict=False)]


@given(payloads=payloads, cuts=st.lists(st.integers(0, 10000), max_size=20))
def test_any_split_gives_the_same_payloads(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frame, payloads))
    framer, found = Framer(LIMIT), []
    for piece in pieces(stream, cuts):
        found += framer.feed(piece)
    assert found == payloads
    assert framer.pending == 0


@given(payloads=payloads)
def test_byte_by_byte(payloads: list[bytes]) -> None:
    framer, found = Framer(LIMIT), []
    for byte in b"".join(map(frame, payloads)):
        found += framer.feed(bytes([byte]))
    assert found == payloads


def test_pending_counts_what_is_half_there() -> None:
    framer = Framer(LIMIT)
    data = frame(b"abcdef")
    for count in range(1, len(data)):
        assert list(framer.feed(data[count - 1 : count])) == []
        assert framer.pending == count
    assert list(framer.feed(data[-1:])) == [b"abcdef"]
    assert framer.pending == 0


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_other_buffers_are_copied(kind: type) -> None:
    data = bytearray(frame(b"abc") + b"\0\0")
    framer = Framer(LIMIT)
    (payload,) = framer.feed(kind(data))
    data[:] = bytes(len(data))
    assert payload == b"abc"
    assert list(framer.feed(b"\0\1z")) == [b"z"]


@pytest.mark.parametrize(("header", "code", "limit"), [
    (b"\0\0\0\0", Code.PROTOCOL, None),
    ((LIMIT + 1).to_bytes(4, "big"), Code.FRAME_TOO_LARGE, LIMIT),
    (b"\xff\xff\xff\xff", Code.FRAME_TOO_LARGE, LIMIT),
])
def test_a_bad_length_is_refused_at_its_header(header: bytes, code: Code, limit: int | None) -> None:
    framer, found = Framer(LIMIT), []
    with pytest.raises(ConnectionFault) as raised:
        found.extend(framer.feed(frame(b"before") + header))
    assert found == [b"before"]
    assert (raised.value.code, raised.value.limit) == (code, limit)


def test_the_longest_frame_is_accepted() -> None:
    assert list(Framer(LIMIT).feed(frame(bytes(LIMIT)))) == [bytes(LIMIT)]


def test_what_is_announced_is_not_reserved() -> None:
    framer = Framer(8 << 20)
    tracemalloc.start()
    try:
        for piece in (b"\0\x80", b"\0\0", b"x" * 1000):
            assert list(framer.feed(piece)) == []
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()


def test_memory_of_finished_frames_is_given_back() -> None:
    framer = Framer(8 << 20)
    data = frame(bytes(4 << 20))
    tracemalloc.start()
    try:
        for start in range(0, len(data), 1 << 16):
            list(framer.feed(data[start : start + (1 << 16)]))
        assert tracemalloc.get_traced_memory()[0] < 64 << 10
    finally:
        tracemalloc.stop()
