"""The look at a payload before it is unpacked."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest
from colibri_protocol.errors import Code, ConnectionFault
from colibri_protocol.limits import MAX_ARRAY, MAX_DEPTH, MAX_ITEMS, MAX_MAP, MAX_TEXT
from colibri_protocol.scan import SIZED, WIDTHS, scan
from hypothesis import example, given
from hypothesis import strategies as st

scalars = (st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=40)
           | st.binary(max_size=300))
keys = st.text(max_size=40) | st.integers(-(2**63), 2**64 - 1)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=20) | st.dictionaries(keys, v, max_size=20),
                      max_leaves=30)


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


def nested(levels: int) -> bytes:
    return b"\x91" * levels + b"\xc0"


@given(value=values)
def test_what_msgpack_writes_is_accepted_and_no_part_of_it(value: Any) -> None:
    data = msgpack.packb(value)
    if depth(value) > MAX_DEPTH:
        with pytest.raises(ConnectionFault):
            scan(data)
        return
    scan(data)
    for cut in {1, len(data) // 2, len(data) - 1} - {0, len(data)}:
        with pytest.raises(ConnectionFault):
            scan(data[:cut])
    with pytest.raises(ConnectionFault):
        scan(data + b"\0")


@given(data=st.binary(max_size=64))
@example(b"\xd9")
@example(b"\x81\xc0")
def test_random_bytes_are_refused_or_can_be_unpacked(data: bytes) -> None:
    try:
        scan(data)
    except ConnectionFault:
        return
    msgpack.unpackb(data, raw=True, object_pairs_hook=list, strict_map_key=False)


def test_every_lead_byte_is_in_one_table() -> None:
    refused = [lead for lead in range(256) if not WIDTHS[lead] and SIZED[lead] is None]
    assert refused == [0xC1, 0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8]
    assert not [lead for lead in range(256) if WIDTHS[lead] and SIZED[lead] is not None]


LARGEST = {
    "array": lambda by: msgpack.packb([None] * (MAX_ARRAY + by)),
    "map": lambda by: msgpack.packb(dict.fromkeys(range(MAX_MAP + by))),
    "text": lambda by: msgpack.packb("x" * (MAX_TEXT + by)),
    "depth": lambda by: nested(MAX_DEPTH + by),
    "values": lambda by: msgpack.packb([[None] * MAX_ARRAY] * 3 + [[None] * (MAX_ITEMS - 3 * MAX_ARRAY - 5 + by)]),
}


@pytest.mark.parametrize("kind", LARGEST)
def test_limits_are_exact(kind: str) -> None:
    scan(LARGEST[kind](0))
    with pytest.raises(ConnectionFault) as raised:
        scan(LARGEST[kind](1))
    assert raised.value.code is Code.PROTOCOL
    assert raised.value.limit in (MAX_ARRAY, MAX_MAP, MAX_TEXT, MAX_DEPTH, MAX_ITEMS)


BOMBS = {
    "70 KB of array16 headers": b"\xdc\xff\xff" * 23333,
    "70 KB of array16 of one": b"\xdc\x00\x01" * 23333,
    "array32 of 2^32-1": b"\xdd\xff\xff\xff\xff",
    "array16 of 65535 with few bytes": b"\xdc\xff\xff" + bytes(100),
    "map32 of 2^32-1": b"\xdf\xff\xff\xff\xff",
    "bin32 of 2^32-1": b"\xc6\xff\xff\xff\xff",
    "str32 of 2^32-1": b"\xdb\xff\xff\xff\xff",
    "1 MiB of small arrays": b"\xdc\x10\x00" + (b"\x9f" + bytes(15)) * 4096,
    "1 MiB of empty maps": b"\xdc\x10\x00" + (b"\xdc\x00\xff" + b"\x80" * 255) * 4096,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_bombs_reserve_nothing(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ConnectionFault):
            scan(bomb)
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()
