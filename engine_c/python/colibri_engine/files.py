"""Reading files nobody vouches for: only regular files, bounded sizes, exact reads, JSON without surprises.

Files are read with pread and never mapped, so one that shrinks underneath is an error instead of SIGBUS, and reading
tens of gigabytes does not grow the process.
"""

from __future__ import annotations

import json
import os
import stat
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from .errors import ColibriError, ConversionError

_JSON_LIMIT = 256 << 20  # bytes; a tokenizer.json of 200k tokens has 20 MB


class RegularFile:
    """A regular file open for reading. `error` is the exception type raised for whatever is wrong with it."""

    def __init__(self, path: Path, error: type[Any] = ConversionError) -> None:
        self.path, self._error = path, error
        try:
            # Non-blocking: opening a FIFO must not wait for a writer.
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as e:
            raise self.fail(_reason(e)) from e
        self.close = weakref.finalize(self, os.close, self.fd)  # at the latest when nobody refers to it any more
        info = os.fstat(self.fd)
        if not stat.S_ISREG(info.st_mode):
            self.close()
            raise self.fail("is a directory" if stat.S_ISDIR(info.st_mode) else "is not a regular file")
        self.size = info.st_size

    def fail(self, reason: str, item: str | None = None) -> ColibriError:
        """The error to raise for this file."""
        error: ColibriError = self._error(self.path, reason, item)
        return error

    def read_into(self, offset: int, out: npt.NDArray[np.uint8]) -> None:
        """Fills `out` from `offset`, or raises if the file ends before that."""
        view, done = memoryview(out), 0
        while done < len(view):
            try:
                n = os.preadv(self.fd, [view[done:]], offset + done)
            except OSError as e:
                raise self.fail(_reason(e)) from e
            if n == 0:
                raise self.fail(f"ends at byte {offset + done}, {len(view) - done} more were expected")
            done += n

    def read(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """Bytes [offset, offset + size); the extent is checked against the file before memory is taken."""
        if not 0 <= offset <= offset + size <= self.size:
            raise self.fail(f"has {self.size} bytes, bytes {offset} to {offset + size} were expected")
        out = np.empty(size, np.uint8)
        self.read_into(offset, out)
        return out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _reason(e: OSError | ValueError) -> str:
    return f"cannot be read: {e.strerror}" if isinstance(e, OSError) and e.strerror else f"cannot be read: {e}"


def read_whole(path: Path, error: type[Any] = ConversionError, limit: int = _JSON_LIMIT) -> bytes:
    """A small file's contents."""
    with RegularFile(path, error) as f:
        if f.size > limit:
            raise f.fail(f"has {f.size} bytes, more than the {limit} allowed here")
        return f.read(0, f.size).tobytes()


def read_json(path: Path, error: type[Any] = ConversionError) -> dict[str, Any]:
    """A JSON object from a file; duplicate keys, NaN and Infinity are refused."""
    return parse_json(read_whole(path, error), path, error)


def parse_json(text: bytes, path: Path, error: type[Any] = ConversionError) -> dict[str, Any]:
    """A JSON object from bytes of `path`."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise error(path, f"is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise error(path, "is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} occurs twice")
    return result


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")
