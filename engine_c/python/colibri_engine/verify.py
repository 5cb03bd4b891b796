"""Checking a container: its table against its geometry and files, then every byte against its checksum.

Findings are collected, not raised: one damaged model should tell everything that is wrong with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .ahead import map_ahead
from .container import EXPERT_ALIGNMENT, FILES, MANIFEST, TENSOR_ALIGNMENT, Manifest, TensorEntry
from .errors import ColibriError, ContainerError
from .files import RegularFile
from .geometry import Slot, slots
from .panels import PANEL, Bytes, aligned, panel_bytes, unpack

_SLAB = 2 << 20  # bytes read and unpacked at a time
_MOST_MISSING = 20  # a geometry may promise millions of tensors that are not there; these are enough to say so


@dataclass(frozen=True)
class Finding:
    """One thing wrong: the file, the tensor or field if there is one, and the reason."""

    path: Path
    item: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.item}: {self.reason}" if self.item else f"{self.path}: {self.reason}"


def verify(folder: Path, advance: Callable[[int], None] = lambda n: None) -> list[Finding]:
    """Everything wrong with a container; an empty list if it is sound. `advance` is told of bytes checked.

    Raises ContainerError if there is no manifest that could be checked against.
    """
    manifest = Manifest.load(folder)
    found = list(structure(folder, manifest))
    if manifest.computed_id() != manifest.model_id:
        found.append(Finding(folder / MANIFEST, "model_id", "does not belong to this architecture and these tensors"))
    if not found:
        found.extend(_contents(folder, manifest, advance))
    return found


def stored_size(folder: Path) -> int:
    """Bytes that verify() will have checked at its end."""
    return sum(t.bytes for t in Manifest.load(folder).tensors)


def structure(folder: Path, manifest: Manifest) -> Iterator[Finding]:
    """Files, extents, presence and shapes; reads no weight."""
    path = folder / MANIFEST
    if tuple(name for name, _ in manifest.files) != FILES:
        yield Finding(path, "files", f"must be {' and '.join(FILES)}")
        return
    yield from _file_sizes(folder, manifest)
    yield from _extents(path, manifest)
    yield from _presence(path, manifest)


def _file_sizes(folder: Path, manifest: Manifest) -> Iterator[Finding]:
    for name, size in manifest.files:
        try:
            with RegularFile(folder / name, ContainerError) as f:
                if f.size != size:
                    yield Finding(folder / name, None, f"has {f.size} bytes, the manifest says {size}")
        except ContainerError as e:
            yield Finding(folder / name, None, e.reason)


def _extents(path: Path, manifest: Manifest) -> Iterator[Finding]:
    for file, (name, size) in enumerate(manifest.files):
        end, previous = 0, ""
        for t in sorted((t for t in manifest.tensors if t.file == file), key=lambda t: t.offset):
            if t.offset < end:
                yield Finding(path, t.name, f"overlaps {previous} in {name}")
            end, previous = t.offset + t.bytes, t.name
            if end > size:
                yield Finding(path, t.name, f"ends at byte {end} of {name}, which has {size}")
            alignment = EXPERT_ALIGNMENT if t.role == "ffn_gate" else TENSOR_ALIGNMENT
            if t.offset % alignment:
                yield Finding(path, t.name, f"starts at byte {t.offset}, not a multiple of {alignment}")


def _presence(path: Path, manifest: Manifest) -> Iterator[Finding]:
    have: dict[tuple[str, int, int], TensorEntry] = {}
    for t in manifest.tensors:
        key = (t.role, t.layer, t.expert)
        if key in have:
            yield Finding(path, t.name, f"is a second {t.role} of layer {t.layer}, expert {t.expert}")
        have[key] = t
    end = missing = 0
    for slot in slots(manifest.architecture, manifest.geometry):
        key = (slot.role, slot.layer, slot.expert)
        if key not in have:
            yield Finding(path, slot.name, f"is missing ({slot.role} of layer {slot.layer}, expert {slot.expert})")
            missing += 1
            if missing == _MOST_MISSING:
                return
            continue
        t = have.pop(key)
        yield from _fits(path, t, slot, end)
        end = t.offset + t.bytes
    for t in have.values():
        yield Finding(path, t.name, f"is not part of a {manifest.architecture} model of this geometry")


def _fits(path: Path, t: TensorEntry, slot: Slot, end: int) -> Iterator[Finding]:
    """t against its slot; `end` is where the tensor before it ended."""
    if t.shape != slot.shape:
        yield Finding(path, t.name, f"has shape {list(t.shape)}, {list(slot.shape)} was expected")
    if t.layout != slot.layout or t.file != slot.file or (slot.group == "f32" and t.dtype != "f32"):
        yield Finding(path, t.name, f"must not be {t.dtype} in layout {t.layout} in {FILES[t.file % len(FILES)]}")
    if t.bytes != _stored_bytes(t):
        yield Finding(path, t.name, f"has {t.bytes} bytes, its shape and dtype imply {_stored_bytes(t)}")
    if slot.role in ("ffn_up", "ffn_down") and t.offset != end:
        yield Finding(path, t.name, "does not follow the tensor before it; an expert is one extent")


def _stored_bytes(t: TensorEntry) -> int:
    return 4 * t.shape[0] if len(t.shape) == 1 else panel_bytes(t.dtype, *t.shape)


def _contents(folder: Path, manifest: Manifest, advance: Callable[[int], None]) -> Iterator[Finding]:
    for file, (name, _) in enumerate(manifest.files):
        with RegularFile(folder / name, ContainerError) as f:
            for t in sorted((t for t in manifest.tensors if t.file == file), key=lambda t: t.offset):
                try:
                    yield from _tensor(f, t, advance)
                except ColibriError as e:
                    yield Finding(f.path, t.name, getattr(e, "reason", str(e)))


def _tensor(f: RegularFile, t: TensorEntry, advance: Callable[[int], None]) -> Iterator[Finding]:
    """Checksum and finiteness of one tensor, in slabs of whole panels."""
    rows, cols = (1, t.shape[0]) if t.layout == "row" else t.shape
    stride = t.bytes if t.layout == "row" else panel_bytes(t.dtype, PANEL, cols)
    step = max(1, _SLAB // stride) * PANEL

    def load(row: int) -> tuple[Bytes, bool]:
        """The stored bytes from a row on, and whether all their values are finite."""
        count = min(step, rows - row)
        slab = aligned(-(-count // PANEL) * stride)
        f.read_into(t.offset + row // PANEL * stride, slab)
        values = slab.view(np.float32) if t.layout == "row" else unpack(t.dtype, count, cols, slab)
        return slab, bool(np.isfinite(values).all())

    digest, finite = hashlib.sha256(), True
    for slab, sound in map_ahead(load, range(0, rows, step)):
        digest.update(slab)
        finite = finite and sound
        advance(slab.size)
    if digest.hexdigest() != t.sha256:
        yield Finding(f.path, t.name, "does not match its checksum; the file is damaged, convert the model again")
    elif not finite:
        yield Finding(f.path, t.name, "holds a value or scale that is NaN or infinite")
