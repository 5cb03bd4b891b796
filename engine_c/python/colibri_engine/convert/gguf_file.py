"""Reading one GGUF file: metadata and tensor table, every count and offset checked before it is used.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md. Block layouts and dequantisation are the gguf package's own.
Its GGUFReader maps the file and trusts the table; this one reads with pread and does not.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..files import RegularFile
from .tensor import F32, Quants, Tensor

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_CHUNK = 1 << 20
_STRING, _ARRAY, _BOOL = 8, 9, 7
# value type -> struct code
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_MAX_DIM = 1 << 53


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the table. shape is row-major (GGUF's own dimensions reversed); offset is absolute."""

    file: RegularFile
    name: str
    kind: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    row_bytes: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    def check_type(self) -> None:
        """Refuses a type the gguf package cannot dequantise."""
        try:
            _dequantize(np.zeros((1, self.row_bytes), np.uint8), self.kind)
        except NotImplementedError as e:
            raise self.file.fail(f"type {self.kind.name} cannot be converted", self.name) from e

    def window(self, first: int, rows: int, cols: int) -> GgufMatrix:
        """Rows [first, first + rows) of the tensor seen as a matrix of `cols` columns."""
        return GgufMatrix(self.file.path, self.name, rows, cols, self, first)


@dataclass(frozen=True)
class GgufMatrix(Tensor):
    """A matrix inside a tensor, `first` rows from its beginning."""

    stored: GgufTensor
    first: int

    def read(self, start: int, stop: int) -> F32:
        with np.errstate(all="ignore"):  # non-finite scales are found when packing
            return _dequantize(self._raw(start, stop), self.stored.kind).reshape(stop - start, self.cols)

    def quants(self, dtype: str, start: int, stop: int) -> Quants | None:
        split = _REPACK.get((self.stored.kind.name, dtype))
        return split(self._raw(start, stop)) if split else None

    def _raw(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        row = self.stored.row_bytes
        data = self.stored.file.read(self.stored.offset + (self.first + start) * row, (stop - start) * row)
        return data.reshape(stop - start, row)


def _dequantize(data: npt.NDArray[np.uint8], kind: Any) -> F32:
    from gguf.quants import dequantize  # a slow import

    return np.asarray(dequantize(data, kind), np.float32)


def _split_q8_0(raw: npt.NDArray[np.uint8]) -> Quants:
    """Blocks of 34 bytes: f16 scale, 32 int8."""
    blocks = raw.reshape(raw.shape[0], -1, 34)
    scales = np.ascontiguousarray(blocks[..., :2]).view("<u2")[..., 0]
    return np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(raw.shape[0], -1), scales


def _split_q4_0(raw: npt.NDArray[np.uint8]) -> Quants:
    """Blocks of 18 bytes: f16 scale, 16 bytes with value i in the low and value 16 + i in the high nibble, plus 8."""
    blocks = raw.reshape(raw.shape[0], -1, 18)
    scales = np.ascontiguousarray(blocks[..., :2]).view("<u2")[..., 0]
    packed = blocks[..., 2:]
    q = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int8) - np.int8(8)
    return q.reshape(raw.shape[0], -1), scales


# (GGUF type, our dtype) -> how to take it over without quantising again
_REPACK = {("Q8_0", "q8"): _split_q8_0, ("Q4_0", "q4"): _split_q4_0}


class _Cursor:
    """Sequential bounded reads from a file, in chunks."""

    def __init__(self, file: RegularFile) -> None:
        self.file, self.position = file, 0
        self._chunk, self._start = b"", 0

    def take(self, size: int) -> bytes:
        if size > self.file.size - self.position:
            raise self.file.fail(f"ends in the middle of its header, at byte {self.file.size}; it is truncated")
        begin = self.position - self._start
        if begin + size > len(self._chunk):
            length = min(max(size, _CHUNK), self.file.size - self.position)
            self._chunk, self._start, begin = self.file.read(self.position, length).tobytes(), self.position, 0
        self.position += size
        return self._chunk[begin : begin + size]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", "replace")

    def value(self, kind: int, nested: bool = False) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and not nested:
            return self._array(self.scalar("I"), self.scalar("Q"))
        if kind not in _SCALARS:
            raise self.file.fail(f"metadata value type {kind} is unknown or a nested array")
        value = self.scalar(_SCALARS[kind])
        return bool(value) if kind == _BOOL else value

    def _array(self, kind: int, count: int) -> list[Any]:
        code = _SCALARS.get(kind)
        width = struct.calcsize(code) if code else 8  # a string has at least its length
        if count * width > self.file.size - self.position:
            raise self.file.fail(f"a metadata array of {count} elements does not fit into the file; it is truncated")
        if code:
            return list(struct.unpack(f"<{count}{code}", self.take(count * width)))
        return [self.value(kind, nested=True) for _ in range(count)]


def open_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """(metadata, tensors by name). Raises ConversionError naming file and tensor or key."""
    file = RegularFile(path)
    try:
        return _parse(file)
    except BaseException:
        file.close()
        raise


def _need_gguf_package(file: RegularFile) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise file.fail("reading GGUF needs the gguf package: pip install 'colibri-daemon[convert]'") from None


def _parse(file: RegularFile) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    _need_gguf_package(file)
    cursor = _Cursor(file)
    if file.size < 24 or cursor.take(4) != _MAGIC:
        raise file.fail("is not a GGUF file (no GGUF magic at its start)")
    version, tensor_count, key_count = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
    if version not in _VERSIONS:
        raise file.fail(f"is GGUF version {version}; little-endian versions 2 and 3 are supported")
    if max(tensor_count, key_count) > file.size // 8:
        raise file.fail(f"counts {tensor_count} tensors and {key_count} keys do not fit into the file")
    fields: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string()
        if key in fields:
            raise file.fail("metadata key occurs twice", key)
        fields[key] = cursor.value(cursor.scalar("I"))
    rows = [_table_row(cursor) for _ in range(tensor_count)]
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise file.fail(f"is {alignment!r}, must be a power of two from 8 on", "general.alignment")
    base = -(-cursor.position // alignment) * alignment
    tensors = [_tensor(file, base, alignment, *row) for row in rows]
    _check_extents(file, tensors)
    return fields, {t.name: t for t in tensors}


def _table_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, n_dims = cursor.string(), cursor.scalar("I")
    if not 1 <= n_dims <= 4:
        raise cursor.file.fail(f"has {n_dims} dimensions", name)
    dims = struct.unpack(f"<{n_dims}Q", cursor.take(8 * n_dims))
    return name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")


def _tensor(
    file: RegularFile, base: int, alignment: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # a slow import

    if kind not in iter(GGMLQuantizationType):
        raise file.fail(f"tensor type {kind} is unknown", name)
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if not all(1 <= n < _MAX_DIM for n in shape) or shape[-1] % block:
        raise file.fail(f"shape {list(shape)} is not possible for its type", name)
    if offset % alignment:
        raise file.fail(f"offset {offset} is not a multiple of {alignment}", name)
    row_bytes = shape[-1] // block * block_bytes
    return GgufTensor(file, name, GGMLQuantizationType(kind), shape, base + offset, row_bytes)


def _check_extents(file: RegularFile, tensors: list[GgufTensor]) -> None:
    """Inside the file, not overlapping, no name twice."""
    names: set[str] = set()
    end = 0
    for t in sorted(tensors, key=lambda t: t.offset):
        if t.name in names:
            raise file.fail("tensor occurs twice", t.name)
        if t.offset < end:
            raise file.fail("tensor overlaps the one before it", t.name)
        end = t.offset + t.bytes
        if end > file.size:
            raise file.fail(f"tensor ends at byte {end}, the file has {file.size}; it is truncated", t.name)
        names.add(t.name)
