"""Cuts a byte stream into frames: a 4-byte big-endian length, then that many bytes of payload.

Memory: what is announced is never reserved; a Framer holds at most one unfinished frame, as far as it has come.
Time: linear in the bytes fed, however they are split.
"""

from __future__ import annotations

from collections.abc import Iterator

from .errors import Code, ConnectionFault
from .limits import HEADER_BYTES


def frame(payload: bytes) -> bytes:
    """payload with its header. Its length is the caller's business."""
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


class Framer:
    """max_frame: longest payload accepted, in bytes."""

    __slots__ = ("_buffer", "_max_frame", "_wanted")

    def __init__(self, max_frame: int) -> None:
        self._max_frame = max_frame
        self._buffer = bytearray()  # an unfinished frame, header included
        self._wanted = HEADER_BYTES  # bytes it must have before it is worth a look

    @property
    def pending(self) -> int:
        """Bytes of an unfinished frame."""
        return len(self._buffer)

    def clear(self) -> None:
        """Forgets an unfinished frame: nothing will be fed any more."""
        self._buffer, self._wanted = bytearray(), HEADER_BYTES

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that data completes. A bad length is a ConnectionFault before its body is looked at, and after
        the payloads before it. Run it to its end or clear()."""
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._wanted:
                return
            data = self._buffer
        data = bytes(data)  # the same object, unless it is a bytearray or memoryview
        self._buffer = bytearray()
        self._wanted = HEADER_BYTES
        at, end = 0, len(data)
        while (body := at + HEADER_BYTES) <= end:
            size = self._check(int.from_bytes(data[at:body], "big"))
            if body + size > end:
                self._wanted += size
                break
            at = body + size
            yield data[body:at]
        if at < end:
            self._buffer += memoryview(data)[at:]

    def _check(self, size: int) -> int:
        """size, if a frame may have it."""
        if size == 0:
            raise ConnectionFault(Code.PROTOCOL, "a frame of length 0; a payload has at least one byte")
        if size > self._max_frame:
            raise ConnectionFault(Code.FRAME_TOO_LARGE,
                                  f"a frame of {size} bytes; at most {self._max_frame} are allowed",
                                  limit=self._max_frame)
        return size
