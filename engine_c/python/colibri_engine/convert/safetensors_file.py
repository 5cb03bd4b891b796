"""Reading one safetensors file: 8 bytes of header length, a JSON header, the tensors' bytes.

The header is checked here, by the format's own rules (no gaps, no overlap, nothing after the last tensor), and data is
read with pread. The safetensors package maps the file instead: a truncated one could end in SIGBUS, and every page
touched counts as the converter's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConversionError
from ..files import RegularFile, parse_json
from .tensor import F32, Tensor

_HEADER_LIMIT = 100_000_000  # bytes, as in the reference implementation
_MAX_DIM = 1 << 53

# Element bytes of every dtype the format knows; only those of _DECODE can be converted.
_WIDTH = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


def _bf16(raw: npt.NDArray[np.uint8]) -> F32:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


_DECODE = {
    "F32": lambda raw: raw.view("<f4"),
    "F16": lambda raw: raw.view("<f2").astype(np.float32),
    "BF16": _bf16,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the header; begin and end are absolute file offsets."""

    file: RegularFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def check_dtype(self) -> None:
        if self.dtype not in _DECODE:
            reason = f"dtype {self.dtype} cannot be converted; supported are {', '.join(_DECODE)}"
            raise ConversionError(self.file.path, reason, self.name)

    def window(self, first: int, rows: int, cols: int) -> SafetensorsTensor:
        """Rows [first, first + rows) of the tensor seen as a matrix of `cols` columns."""
        return SafetensorsTensor(self.file.path, self.name, rows, cols, self, first)


@dataclass(frozen=True)
class SafetensorsTensor(Tensor):
    """A matrix inside a stored tensor, `first` rows from its beginning."""

    stored: StoredTensor
    first: int

    def read(self, start: int, stop: int) -> F32:
        row = self.cols * _WIDTH[self.stored.dtype]
        raw = self.stored.file.read(self.stored.begin + (self.first + start) * row, (stop - start) * row)
        return _DECODE[self.stored.dtype](raw).reshape(stop - start, self.cols)


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. The file stays open as long as one of them is referred to.

    Raises ConversionError naming the file and, where there is one, the tensor.
    """
    file = RegularFile(path)
    try:
        return _parse(file)
    except BaseException:
        file.close()
        raise


def _parse(file: RegularFile) -> dict[str, StoredTensor]:
    if file.size < 8:
        raise file.fail(f"has {file.size} bytes, too few for a safetensors file; download it again")
    length = int(file.read(0, 8).view("<u8")[0])
    if length > min(_HEADER_LIMIT, file.size - 8):
        raise file.fail(f"header length {length} does not fit; the file is truncated or no safetensors file")
    header = parse_json(file.read(8, length).tobytes(), file.path)
    header.pop("__metadata__", None)
    base = 8 + length
    found = [_entry(file, name, value, base) for name, value in header.items()]
    _check_extents(file, found, base)
    return {t.name: t for t in found}


def _entry(file: RegularFile, name: str, value: Any, base: int) -> StoredTensor:
    if not isinstance(value, dict):
        raise file.fail("header entry is not an object", name)
    dtype = value.get("dtype")
    if not isinstance(dtype, str) or dtype not in _WIDTH:
        raise file.fail(f"dtype {dtype!r} is unknown", name)
    shape = _integers(file, name, "shape", value.get("shape"))
    offsets = _integers(file, name, "data_offsets", value.get("data_offsets"))
    if len(offsets) != 2:
        raise file.fail("data_offsets must be two integers", name)
    begin, end = offsets
    size = _WIDTH[dtype]
    for n in shape:  # Python integers: no product wraps
        size *= n
    if end - begin != size:
        raise file.fail(f"data_offsets {begin} to {end} do not hold {dtype} {list(shape)} ({size} bytes)", name)
    return StoredTensor(file, name, dtype, shape, base + begin, base + end)


def _integers(file: RegularFile, name: str, key: str, value: Any) -> tuple[int, ...]:
    plain = isinstance(value, list) and all(type(n) is int and 0 <= n < _MAX_DIM for n in value)
    if not plain or len(value) > 8:
        raise file.fail(f"{key} must be a list of at most 8 non-negative integers", name)
    return tuple(value)


def _check_extents(file: RegularFile, found: list[StoredTensor], base: int) -> None:
    """The data must be covered exactly: no gap, no overlap, no missing end, nothing left over."""
    position = base
    in_order = sorted(found, key=lambda t: (t.begin, t.end))
    for t in in_order:
        if t.end > file.size:
            raise file.fail(f"ends at byte {t.end}, the file has {file.size}; it is truncated", t.name)
    for t in in_order:
        if t.begin != position:
            what = "overlaps the tensor before it" if t.begin < position else "leaves a gap before it"
            raise file.fail(f"data_offsets are malformed: {what}", t.name)
        position = t.end
    if position != file.size:
        raise file.fail(f"has {file.size - position} bytes that belong to no tensor")
