"""What a payload may look like, checked on its bytes before anything is unpacked.

Unpacking reserves what an array announces and recurses as deep as it is told, so a few bytes could cost gigabytes.
One pass over the lead bytes, without making a value, refuses what is too deep, too long, too many, cut off or of a type
that the protocol does not use. Text and binary are skipped in one step: a frame that is mostly one bin costs nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from .errors import Code, ConnectionFault
from .limits import FRAME_CEILING, MAX_ARRAY, MAX_DEPTH, MAX_ITEMS, MAX_MAP, MAX_TEXT


class Sized(NamedTuple):
    """A type whose length follows its lead byte in `size` bytes, or is in its low bits, `mask`, when size is 0.
    values: how many values an entry is; 0 = the length is bytes to be skipped."""

    name: str
    size: int
    limit: int
    values: int = 0
    mask: int = 0


def _widths() -> list[int]:
    """[lead byte] bytes of a value of fixed width, lead byte included; 0 for all others."""
    widths = [0] * 256
    for lead in (*range(0x00, 0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3):  # small ints, nil, false, true
        widths[lead] = 1
    for lead in range(0xA0, 0xC0):  # short text
        widths[lead] = 1 + (lead & 0x1F)
    for lead, bytes_ in ((0xCA, 4), (0xCB, 8), *zip(range(0xCC, 0xD4), (1, 2, 4, 8) * 2, strict=True)):  # numbers
        widths[lead] = 1 + bytes_
    return widths


def _sized() -> list[Sized | None]:
    """[lead byte] types with a length; None for those refused: ext and the reserved byte."""
    rows: list[Sized | None] = [None] * 256
    rows[0x80:0x90] = [Sized("map", 0, MAX_MAP, 2, 0x0F)] * 16
    rows[0x90:0xA0] = [Sized("array", 0, MAX_ARRAY, 1, 0x0F)] * 16
    rows[0xC4:0xC7] = [Sized("binary", size, FRAME_CEILING) for size in (1, 2, 4)]
    rows[0xD9:0xDC] = [Sized("text", size, MAX_TEXT) for size in (1, 2, 4)]
    rows[0xDC:0xDE] = [Sized("array", size, MAX_ARRAY, 1) for size in (2, 4)]
    rows[0xDE:0xE0] = [Sized("map", size, MAX_MAP, 2) for size in (2, 4)]
    return rows


WIDTHS, SIZED = _widths(), _sized()


def broken(reason: str, limit: int | None = None) -> ConnectionFault:
    return ConnectionFault(Code.PROTOCOL, reason, limit=limit)


def scan(payload: bytes) -> None:
    """ConnectionFault PROTOCOL unless payload is exactly one msgpack value within the limits."""
    end, at = len(payload), 0
    left, outer = 1, []  # values still to come at this level, and at the levels around it
    items = 1
    while left:
        if at >= end:
            raise broken("the frame ends within a value")
        lead = payload[at]
        left -= 1
        if width := WIDTHS[lead]:
            at += width
        else:
            row = SIZED[lead]
            if row is None:
                raise broken(f"type byte 0x{lead:02x} is not used by this protocol")
            start = at + 1
            at = start + row.size
            length = int.from_bytes(payload[start:at], "big") if row.size else lead & row.mask
            _check_length(row, length, end - at)
            if row.values:
                items = _check_nesting(items + length * row.values, len(outer))
                outer.append(left)
                left = length * row.values
            else:
                at += length
        while not left and outer:
            left = outer.pop()
    if at != end:
        raise broken("the frame ends within a value" if at > end else f"{end - at} bytes follow the message")


def _check_length(row: Sized, length: int, remaining: int) -> None:
    if length > row.limit:
        raise broken(f"{row.name} of length {length}; at most {row.limit} is allowed", row.limit)
    if length * (row.values or 1) > remaining:
        raise broken(f"{row.name} announces length {length}, but {max(remaining, 0)} bytes are left in the frame")


def _check_nesting(items: int, depth: int) -> int:
    if depth >= MAX_DEPTH:
        raise broken(f"arrays and maps are nested deeper than {MAX_DEPTH}", MAX_DEPTH)
    if items > MAX_ITEMS:
        raise broken(f"more than {MAX_ITEMS} values in one frame", MAX_ITEMS)
    return items
