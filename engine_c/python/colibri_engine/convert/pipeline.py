"""Source -> packed tensors -> container."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..ahead import map_ahead
from ..container import Manifest
from ..errors import ConversionError, EngineError
from ..geometry import POLICY, Slot, slots
from ..panels import PANEL, pack, pack_quants, panel_bytes
from ..writer import ContainerWriter, check_destination
from .gguf_source import GgufSource
from .hf import HuggingFaceSource
from .source import Source, matrix_shape
from .tensor import Tensor
from .upcycle import Upcycled

_SLAB = 1 << 20  # values read and packed at a time: 4 MiB as float32

Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class Report:
    """What a conversion did."""

    manifest: Manifest
    seconds: float
    warnings: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.manifest.files)


def open_source(path: Path) -> Source:
    """A Hugging Face folder or a GGUF file, opened and its configuration understood."""
    if path.is_dir():
        return HuggingFaceSource(path)
    if path.exists() and path.suffix != ".gguf":
        raise ConversionError(path, "is neither a Hugging Face folder nor a .gguf file")
    return GgufSource(path)


def convert(
    src: Path,
    dst: Path,
    format: str = "q4",
    upcycle: int | None = None,
    force: bool = False,
    advance: Advance = lambda done, total: None,
) -> Report:
    """Converts `src` into the container folder `dst` and returns what was made.

    `upcycle` makes a mixture of that many experts of a dense model. `advance(done, total)` is told of container bytes
    written. Raises ConversionError or ContainerError; then, and on KeyboardInterrupt, nothing is left behind.
    """
    if format not in POLICY:
        raise ConversionError(src, f"{format!r} is not a format; formats are {', '.join(POLICY)}", "--format")
    check_destination(dst, force)
    source = open_source(src)
    if upcycle is not None:
        source = Upcycled(source, upcycle)
    source.check(slots(source.architecture, source.geometry))
    return _write(source, dst, format, force, advance)


def _write(source: Source, dst: Path, fmt: str, force: bool, advance: Advance) -> Report:
    begin = time.monotonic()
    companions = source.companions()
    total = sum(stored_bytes(s, POLICY[fmt][s.group]) for s in slots(source.architecture, source.geometry))
    done = 0

    def counted(chunks: Iterator[Any]) -> Iterator[Any]:
        nonlocal done
        for chunk in chunks:
            yield chunk
            done += chunk.nbytes
            advance(done, total)

    with ContainerWriter(dst, force) as writer:
        writer.reserve(total)
        for slot in slots(source.architecture, source.geometry):
            dtype = POLICY[fmt][slot.group]
            writer.add(slot, dtype, counted(packed(slot, dtype, source.tensor(slot))))
        for name, data in companions.files.items():
            writer.companion(name, data)
        manifest = writer.commit(source.architecture, source.name, fmt, source.geometry)
    return Report(manifest, time.monotonic() - begin, tuple(companions.warnings))


def stored_bytes(slot: Slot, dtype: str) -> int:
    """Bytes of a slot's tensor in the container."""
    return 4 * slot.shape[0] if slot.layout == "row" else panel_bytes(dtype, *matrix_shape(slot))


def packed(slot: Slot, dtype: str, tensor: Tensor) -> Iterator[Any]:
    """A tensor's stored bytes, slab by slab."""
    if slot.layout == "row":
        values = tensor.read(0, 1)
        if not np.isfinite(values).all():
            raise ConversionError(tensor.path, "holds a value that is NaN or infinite", tensor.name)
        yield np.ascontiguousarray(values, "<f4").view(np.uint8).reshape(-1)
        return
    step = max(1, _SLAB // (tensor.cols * PANEL)) * PANEL
    starts = range(0, tensor.rows, step)
    yield from map_ahead(lambda row: _pack_rows(dtype, tensor, row, min(row + step, tensor.rows)), starts)


def _pack_rows(dtype: str, tensor: Tensor, start: int, stop: int) -> Any:
    try:
        quants = tensor.quants(dtype, start, stop)
        return pack(dtype, tensor.read(start, stop)) if quants is None else pack_quants(dtype, *quants)
    except EngineError as e:
        raise ConversionError(tensor.path, f"{e} (rows counted from {start})", tensor.name) from e
