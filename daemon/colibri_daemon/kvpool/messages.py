"""What goes in and out of the pool's core: requests, answers and the fault of a peer."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TOKEN = 4  # bytes: little-endian u32
MODES = {"cache": 1, "absolute": 2}
WorkerId = tuple[int, int]  # (slot, epoch)
_MASK = struct.Struct("<IIB")
FULL_MASK = bytes(_MASK.size)  # what queries see is everything before them
MASK_BYTES = _MASK.size
EVERY = 1 << 62  # more slabs than any sequence has
U32, U64 = 1 << 32, 1 << 64


class PeerFault(Exception):  # noqa: N818  as ConnectionFault
    """A peer sent what a right one never sends. The pool's state is as before; the caller ends that peer."""


def whole(value: Any, below: int, name: str) -> int:
    """value, if it is an integer in [0, below). PeerFault otherwise."""
    if type(value) is not int or not 0 <= value < below:
        raise PeerFault(f"{name} is {value!r}, not a number from 0 to {below - 1}")
    return value


@dataclass(frozen=True, slots=True)
class Request:
    """The attention and the tokens of a sequence. tokens: prompt and output so far; limit: the most of them that may
    come from the cache. salt: requests share slabs only with the same one. use False: neither looks up nor is found.
    verify: every slab is given with its CRC, since what the request has computed made no sense."""

    tokens: bytes = b""
    salt: bytes = b""
    use: bool = True
    pinned: int = 0
    window: int = 0
    positions: str = "cache"
    limit: int = 0
    verify: bool = False

    @classmethod
    def from_wire(cls, body: Any) -> Request:
        """PeerFault if body is no request."""
        try:
            request = cls(**body)
        except TypeError:
            raise PeerFault(f"no request: {str(body)[:200]}") from None
        if not (type(request.tokens) is type(request.salt) is bytes) or len(request.tokens) % TOKEN:
            raise PeerFault("a request's tokens or salt are no bytes or no whole token ids")
        if not (type(request.use) is type(request.verify) is bool) or request.positions not in list(MODES):
            raise PeerFault(f"a request's use, verify and positions are {request.use!r}, {request.verify!r} and "
                            f"{request.positions!r}")
        whole(request.pinned, U32, "pinned")
        whole(request.window, U32, "window")
        whole(request.limit, len(request.tokens) // TOKEN + 1, "limit")
        return request

    def full_slabs(self, slab_tokens: int) -> int:
        """How many slabs from the first on hold the same bits as under full attention: those that end within P + W."""
        return (self.pinned + self.window) // slab_tokens if self.window else EVERY

    @property
    def mask(self) -> bytes:
        """Mask id of the slabs behind those."""
        return _MASK.pack(self.pinned, self.window, MODES[self.positions])

    def same_content(self, other: Request) -> bool:
        """Equal tokens give equal slabs."""
        return (self.salt, self.mask) == (other.salt, other.mask)


@dataclass(frozen=True, slots=True)
class Attached:
    """worker's request goes on behind n tokens, a whole number of slabs. slabs: [ordinal, slab, CRC to verify before
    use or None], those in view. The request holds them until it commits past them or leaves."""

    worker: WorkerId
    key: int
    n: int
    slabs: list[tuple[int, int, int | None]]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Another request computes what this one needs next. Its Attached comes in a later ``woken``."""

    worker: WorkerId
    key: int


@dataclass(frozen=True, slots=True)
class Committed:
    """released: ordinals out of view now, no more the request's."""

    released: list[int]
    woken: list[Attached]


Held = Mapping[int, tuple[Request, list[tuple[int, int]]]]  # key -> its request, [(ordinal, slab)]
