"""A random model of any geometry, written straight into a container: for benchmarks and tests of size.

Weights are normal with deviation 1/sqrt(columns), so that every projection keeps the size of what it gets; the two that
feed the residual stream are smaller by sqrt(2 * layers), as in GPT-2. Activations stay finite at any depth and the
router, being random in full, spreads tokens over all experts.

Embedding, head and router are drawn in full. The other matrices are put together from a pool of packed random panels
in random order, which is as fast as copying: experts differ, though their rows repeat.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConversionError
from ..geometry import POLICY, Geometry, Slot, slots
from ..panels import PANEL, pack, panel_bytes
from ..writer import ContainerWriter
from . import rope
from .companions import hugging_face_config
from .pipeline import Advance, Report, packed, stored_bytes
from .source import matrix_shape
from .tensor import F32, array_tensor

_POOL = 64  # panels
_SLAB = 8 << 20  # bytes written at a time
_IN_FULL = ("embed", "head", "router")
_RESIDUAL = ("attn_o", "ffn_down")
_THETA = 1e6


def synthesise(
    dst: Path,
    geometry: Geometry,
    format: str = "q4",
    seed: int = 0,
    force: bool = False,
    advance: Advance = lambda done, total: None,
) -> Report:
    """Writes the container `dst`; the same arguments give the same bytes. With one expert it is a dense llama.

    Raises ConversionError for an impossible geometry, ContainerError for a destination that cannot be written.
    """
    if problem := geometry.problem():
        raise ConversionError(dst, problem, "geometry")
    if format not in POLICY:
        raise ConversionError(dst, f"{format!r} is not a format; formats are {', '.join(POLICY)}", "--format")
    begin, done = time.monotonic(), 0
    architecture = "mixtral" if geometry.experts > 1 else "llama"
    total = sum(stored_bytes(s, POLICY[format][s.group]) for s in slots(architecture, geometry))
    weights = _Weights(dst, geometry, seed)
    with ContainerWriter(dst, force) as writer:
        writer.reserve(total)
        for slot in slots(architecture, geometry):
            dtype = POLICY[format][slot.group]
            writer.add(slot, dtype, weights.chunks(slot, dtype))
            done += stored_bytes(slot, dtype)
            advance(done, total)
        writer.companion("config.json", _config(architecture, geometry))
        manifest = writer.commit(architecture, dst.absolute().name, format, geometry)
    return Report(manifest, time.monotonic() - begin)


def _config(architecture: str, geometry: Geometry) -> bytes:
    return json.dumps(hugging_face_config(architecture, geometry, _THETA), indent=1).encode()


class _Weights:
    """The random weights, one stream for the whole model."""

    def __init__(self, path: Path, geometry: Geometry, seed: int) -> None:
        self._path, self._geometry = path, geometry
        self._rng = np.random.default_rng(seed)
        self._pools: dict[tuple[str, int, float], npt.NDArray[np.uint8]] = {}

    def chunks(self, slot: Slot, dtype: str) -> Iterator[Any]:
        """A slot's packed bytes."""
        if slot.layout == "row":
            yield from packed(slot, dtype, array_tensor(self._path, slot.name, self._vector(slot)))
        elif slot.role in _IN_FULL:
            yield from self._in_full(slot, dtype)
        else:
            yield from self._from_pool(slot, dtype)

    def _vector(self, slot: Slot) -> F32:
        if slot.role == "rope_freqs":
            return rope.plain(_THETA, self._geometry.head_dim)
        return np.ones(slot.shape, np.float32)

    def _in_full(self, slot: Slot, dtype: str) -> Iterator[Any]:
        rows, cols = matrix_shape(slot)
        step = max(1, _SLAB // (4 * cols * PANEL)) * PANEL
        for row in range(0, rows, step):
            yield pack(dtype, self._normal(min(step, rows - row), cols, 1 / math.sqrt(cols)))

    def _from_pool(self, slot: Slot, dtype: str) -> Iterator[Any]:
        rows, cols = matrix_shape(slot)
        pool, panels = self._pool(slot, dtype, cols), -(-rows // PANEL)
        order = self._rng.integers(0, _POOL, panels)
        step = max(1, _SLAB // pool.shape[1])
        for panel in range(0, panels, step):
            yield pool[order[panel : panel + step]].reshape(-1)

    def _pool(self, slot: Slot, dtype: str, cols: int) -> npt.NDArray[np.uint8]:
        """[_POOL, bytes of a panel], drawn when first asked for."""
        deviation = 1 / math.sqrt(cols)
        if slot.role in _RESIDUAL:
            deviation /= math.sqrt(2 * self._geometry.layers)
        key = (dtype, cols, deviation)
        if key not in self._pools:
            stride = panel_bytes(dtype, PANEL, cols)
            panels = [pack(dtype, self._normal(PANEL, cols, deviation)) for _ in range(_POOL)]
            self._pools[key] = np.concatenate(panels).reshape(_POOL, stride)
        return self._pools[key]

    def _normal(self, rows: int, cols: int, deviation: float) -> F32:
        w = self._rng.standard_normal((rows, cols), dtype=np.float32)
        w *= np.float32(deviation)
        return w
