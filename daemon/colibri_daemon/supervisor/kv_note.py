"""What is said of a KV cache to the next life of the service, in a memory file that goes with it: what it was made for,
and whether the former life ended in order.

One line of JSON, then zeros, then two numbers that change. Written by the supervisor alone. Sealed at its size: what
comes back may be anybody's, and a file that shrinks under its mapping would be our end.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import time
from typing import Any

from ..common.arena import SEALS, most_slabs
from ..common.facts import ModelFacts
from ..common.settings import Settings

SIZE = 4096
FORM = 1  # of the note and of what it is said about
_DOUBT, _STARTS = SIZE // 8 - 2, SIZE // 8 - 1  # places of the numbers, 8 bytes each
_TEXT = 8 * _DOUBT
_NS = 1e9


class Note:
    """about: as from about(). What it does not check is what the fields mean: refusal() does."""

    def __init__(self, fd: int) -> None:
        """The note takes the descriptor. OSError, or ValueError if it is no note."""
        size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if size != SIZE or seals & SEALS != SEALS:
            raise ValueError(f"its note has {size} bytes and seals {seals:#x}")
        self.fd = fd
        self._memory = mmap.mmap(fd, SIZE)
        self._memory.madvise(mmap.MADV_DONTFORK)  # no child of ours can write into it
        self._numbers = memoryview(self._memory).cast("Q")
        self.about = self._read()

    @classmethod
    def make(cls, about: dict[str, Any]) -> Note:
        text = json.dumps(about).encode() + b"\n"
        if len(text) > _TEXT:
            raise ValueError(f"a note of {len(text)} bytes")
        fd = os.memfd_create("colibri-kv-note", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.pwrite(fd, text.ljust(SIZE, b"\0"), 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def _read(self) -> dict[str, Any]:
        try:
            body = json.loads(self._memory[:_TEXT].partition(b"\n")[0])
        except (ValueError, RecursionError):
            raise ValueError("its note cannot be read") from None
        if type(body) is not dict:
            raise ValueError("its note cannot be read")
        return body

    @property
    def doubt(self) -> float | None:
        """When a worker may last have died by a fault without the pool having heard of it, by the monotonic clock; None
        if the former life ended in order."""
        at = self._numbers[_DOUBT] / _NS
        return None if not at else at if at <= time.monotonic() else 0.0

    def beat(self, doubt: float, served: bool) -> None:
        """At each turn of the loop: what is to be doubted if it was the last one. served: the service is, or was,
        ready in this life."""
        self._numbers[_DOUBT] = max(1, round(doubt * _NS))
        if served:
            self._numbers[_STARTS] = 0

    def end(self) -> None:
        """Nothing is left that could write, and the pool has heard of everything."""
        self._numbers[_DOUBT] = 0

    @property
    def starts(self) -> int:
        """Lives that have begun with it since the service was last ready."""
        return self._numbers[_STARTS]

    def begin(self) -> None:
        self._numbers[_STARTS] = min(self.starts, 1 << 32) + 1

    def close(self) -> None:
        self._numbers.release()
        self._memory.close()
        os.close(self.fd)


def about(settings: Settings, facts: ModelFacts, slabs: int) -> dict[str, Any]:
    """What decides whether a later life can use it; JSON."""
    return {
        "form": FORM,
        "model": facts.id,
        "fingerprint": facts.fingerprint,
        "kv_format": facts.kv_format,
        "slab_tokens": facts.slab_tokens,
        "slab_bytes": facts.slab_bytes,
        "slabs": slabs,
        "kv_bytes": settings.kv_bytes,
        "most": most_slabs(settings, facts),
    }


def refusal(kept: dict[str, Any], settings: Settings, facts: ModelFacts) -> str:
    """Why what the note ``kept`` is about cannot be used now; nothing if it can. A default size is not decided anew
    unless what asks for it has changed."""
    slabs = kept.get("slabs")
    if type(slabs) is not int or not 0 < slabs < 1 << 32:
        return f"its note names {str(slabs)[:20]} slabs"
    wanted = about(settings, facts, slabs)
    if settings.kv_bytes:
        wanted["slabs"] = settings.kv_bytes // facts.slab_bytes
        del wanted["kv_bytes"], wanted["most"]
    differing = (name for name in wanted if kept.get(name) != wanted[name])
    if (name := next(differing, None)) is None:
        return ""
    return f"its {name} is {str(kept.get(name))[:80]}, not {wanted[name]}"
