"""One record per slab in memory that outlives this process: what the pool must know again after it was killed.

The record says what a slab holds, not who has it: that the workers declare. A slab without a valid record is free or
leased. A SIGKILL at any byte leaves a record that is valid or recognised as none, since its state is the last thing
written and the first thing erased, differs from zero in each byte, and counts only with a matching checksum over the
rest. The stores need no fences: another process reads them only after this one's end.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from hashlib import sha256

from .messages import MASK_BYTES, TOKEN

MAGIC = b"ColibrKV"
VERSION = 3
COMMITTED, QUARANTINED = b"cmtd", b"quar"  # the states in which the contents must be remembered
_NONE = bytes(4)
_HEADER = struct.Struct("<II32sI")  # slabs, T, identity, version; then MAGIC
_BODY = struct.Struct(f"<32s32sQQIIdB{MASK_BYTES}s")  # as in Entry; then tokens, checksum, state
_SUM = struct.Struct("<I")
_ALIGN = 64
_HEADER_SPACE = _ALIGN


@dataclass(frozen=True, slots=True)
class Entry:
    """uid, parent_uid: of nodes; a parent is found by its uid if it is in the journal too, a root (ordinal 0) by its
    digest, which is ``parent``. Digests are padded with zeros. committed: when, in seconds of the monotonic clock,
    which is one for all processes."""

    slab: int
    digest: bytes = b""
    parent: bytes = b""
    uid: int = 0
    parent_uid: int = 0
    ordinal: int = 0
    crc: int = 0
    committed: float = 0.0
    indexed: bool = False
    mask: bytes = bytes(MASK_BYTES)
    tokens: bytes = b""
    quarantined: bool = False


class Journal:
    """memory: at least size() bytes, and this process its only writer. identity: as the pool's; with another one, or
    another geometry, the contents of the slabs mean nothing and neither do the records."""

    def __init__(self, memory: memoryview, slabs: int, slab_tokens: int, identity: bytes) -> None:
        if len(memory) < self.size(slabs, slab_tokens):
            raise ValueError(f"a journal of {len(memory)} bytes, {self.size(slabs, slab_tokens)} are needed")
        self._memory, self._slabs, self._token_bytes = memory, slabs, slab_tokens * TOKEN
        self._stride = self._size_of_record(slab_tokens)
        self._header = _HEADER.pack(slabs, slab_tokens, sha256(identity).digest(), VERSION)

    @classmethod
    def size(cls, slabs: int, slab_tokens: int) -> int:
        return _HEADER_SPACE + slabs * cls._size_of_record(slab_tokens)

    @staticmethod
    def _size_of_record(slab_tokens: int) -> int:
        used = _BODY.size + slab_tokens * TOKEN + _SUM.size + len(_NONE)
        return -(-used // _ALIGN) * _ALIGN

    def is_ours(self) -> bool:
        """Records of this identity and geometry may be there."""
        end = len(self._header)
        return self._memory[:end] == self._header and self._memory[end : end + len(MAGIC)] == MAGIC

    def why_not(self) -> str:
        """Why the records of another life, if there are any, are not ours; nothing if they are, or there are none."""
        found = bytes(self._memory[: len(self._header)])
        if self.is_ours() or not any(found):
            return ""
        ours, theirs = (_HEADER.unpack(header) for header in (self._header, found))
        names = ("slabs", "slab_tokens", "identity", "version")
        wrong = [name for name, a, b in zip(names, theirs, ours, strict=True) if a != b]
        return f"it is of another {' and '.join(wrong)}" if wrong else "its header is not whole"

    def format(self) -> None:
        """Erases all. The header becomes valid last."""
        end = len(self._header)
        self._memory[end : end + len(MAGIC)] = bytes(len(MAGIC))
        for slab in range(self._slabs):
            self.erase(slab)
        self._memory[:end] = self._header
        self._memory[end : end + len(MAGIC)] = MAGIC

    def load(self) -> list[Entry]:
        """All valid records, by slab; none if the journal is not ours."""
        if not self.is_ours():
            return []
        return [entry for slab in range(self._slabs) if (entry := self._read(slab)) is not None]

    def erase(self, slab: int) -> None:
        """Before the slab is granted to anybody."""
        at = self._state_at(slab)
        self._memory[at : at + len(_NONE)] = _NONE

    def write(self, entry: Entry) -> None:
        """Before anybody is told that the slab is committed."""
        self.erase(entry.slab)
        at, end = self._bounds(entry.slab)
        body = _BODY.pack(entry.digest, entry.parent, entry.uid, entry.parent_uid, entry.ordinal, entry.crc,
                          entry.committed, entry.indexed, entry.mask)  # fmt: skip
        body += entry.tokens.ljust(self._token_bytes, b"\0")
        self._memory[at:end] = body
        self._memory[end : end + _SUM.size] = _SUM.pack(self._checksum(entry.slab, body))
        state = QUARANTINED if entry.quarantined else COMMITTED
        self._memory[end + _SUM.size : end + _SUM.size + len(state)] = state

    def _read(self, slab: int) -> Entry | None:
        at, end = self._bounds(slab)
        state_at = self._state_at(slab)
        state = bytes(self._memory[state_at : state_at + len(_NONE)])
        body = bytes(self._memory[at:end])
        if state not in (COMMITTED, QUARANTINED):
            return None
        if _SUM.unpack_from(self._memory, end)[0] != self._checksum(slab, body):
            return None
        *fields, indexed, mask = _BODY.unpack_from(body)
        return Entry(slab, *fields, bool(indexed), mask, body[_BODY.size :], state == QUARANTINED)

    @staticmethod
    def _checksum(slab: int, body: bytes) -> int:
        return zlib.crc32(body, slab)

    def _bounds(self, slab: int) -> tuple[int, int]:
        """Of the record's body and tokens."""
        at = _HEADER_SPACE + slab * self._stride
        return at, at + _BODY.size + self._token_bytes

    def _state_at(self, slab: int) -> int:
        return self._bounds(slab)[1] + _SUM.size
