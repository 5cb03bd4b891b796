"""The panel layouts of engine_c/src/quant/format.h in plain numpy: an independent second opinion on the C functions.

Written from the text of that header, element by element where possible, with no thought of speed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

PANEL, BLOCK = 16, 32
Array = npt.NDArray[np.generic]


def _blocks(w: Array) -> Array:
    """[rows, cols] -> [panels, blocks, 32 k, 16 rows], padded with zeros."""
    rows, cols = w.shape
    padded = np.zeros((-(-rows // PANEL) * PANEL, -(-cols // BLOCK) * BLOCK), w.dtype)
    padded[:rows, :cols] = w
    return padded.reshape(-1, PANEL, padded.shape[1] // BLOCK, BLOCK).transpose(0, 2, 3, 1)


def _f32_bytes(block: Array) -> bytes:
    return block.astype("<f4").tobytes()


def _f16_bytes(block: Array) -> bytes:
    return block.astype("<f2").tobytes()


def _bf16_bits(x: float) -> int:
    u = int(np.float32(x).view(np.uint32))
    return (u + 0x7FFF + (u >> 16 & 1)) >> 16  # round to nearest even


def _bf16_bytes(block: Array) -> bytes:
    return np.array([_bf16_bits(x) for x in block.reshape(-1)], "<u2").tobytes()


def quantise(block: Array, fmt: str) -> tuple[Array, Array]:
    """[32 k, 16 rows] floats -> (q int8 [32, 16], scale float16 [16])."""
    if fmt == "q8":
        scale, low, high = (np.abs(block).max(axis=0) / np.float32(127)).astype(np.float16), -127, 127
    else:
        extreme = block[np.abs(block).argmax(axis=0), np.arange(PANEL)]
        scale, low, high = (extreme / np.float32(-8)).astype(np.float16), -8, 7
    d = scale.astype(np.float32)
    q = np.rint(np.divide(block, d, out=np.zeros_like(block), where=d != 0))
    return np.clip(q, low, high).astype(np.int8), scale


def _q8_bytes(q: Array, scale: Array) -> bytes:
    """[8 groups][16 rows][4 k] of w + 128, then the scales."""
    out = bytearray(512)
    for k in range(BLOCK):
        for row in range(PANEL):
            out[(k // 4 * PANEL + row) * 4 + k % 4] = int(q[k, row]) + 128
    return bytes(out) + scale.astype("<f2").tobytes()


def _q4_bytes(q: Array, scale: Array) -> bytes:
    """[4 groups][16 rows][4 bytes]: byte j of group i has k = 8i + j in its low nibble, 8i + 4 + j in its high one."""
    out = bytearray(256)
    for k in range(BLOCK):
        for row in range(PANEL):
            i, j, high = k // 8, k % 4, k % 8 >= 4
            out[(i * PANEL + row) * 4 + j] |= (int(q[k, row]) + 8) << (4 if high else 0)
    return bytes(out) + scale.astype("<f2").tobytes()


_FLOATS: dict[str, Callable[[Array], bytes]] = {"f32": _f32_bytes, "f16": _f16_bytes, "bf16": _bf16_bytes}
_QUANTS: dict[str, Callable[[Array, Array], bytes]] = {"q8": _q8_bytes, "q4": _q4_bytes}
FORMATS = (*_FLOATS, *_QUANTS)


def _join(panels: list[list[bytes]]) -> bytes:
    """Blocks of a panel in k order; each panel padded to 64 bytes."""
    joined = (b"".join(blocks) for blocks in panels)
    return b"".join(panel + bytes(-len(panel) % 64) for panel in joined)


def pack(fmt: str, w: npt.NDArray[np.float32]) -> bytes:
    """w [rows, cols] -> the stored bytes."""
    if fmt in _FLOATS:
        return _join([[_FLOATS[fmt](block) for block in panel] for panel in _blocks(w)])
    return _join([[_QUANTS[fmt](*quantise(block, fmt)) for block in panel] for panel in _blocks(w)])


def pack_quants(fmt: str, q: npt.NDArray[np.int8], scales: npt.NDArray[np.uint16]) -> bytes:
    """q [rows, cols], scale bits [rows, cols/32] -> the stored bytes."""
    padded = np.zeros((-(-len(scales) // PANEL) * PANEL, scales.shape[1]), np.uint16)
    padded[: len(scales)] = scales
    by_panel = padded.reshape(-1, PANEL, scales.shape[1]).transpose(0, 2, 1).copy().view(np.float16)
    return _join(
        [
            [_QUANTS[fmt](block, scale) for block, scale in zip(panel, scale_rows, strict=True)]
            for panel, scale_rows in zip(_blocks(q), by_panel, strict=True)
        ]
    )


def _values(fmt: str, block: bytes) -> Array:
    """A stored block -> float32 [32 k, 16 rows]."""
    if fmt == "f32":
        return np.frombuffer(block, "<f4").reshape(BLOCK, PANEL)
    if fmt == "f16":
        return np.frombuffer(block, "<f2").astype(np.float32).reshape(BLOCK, PANEL)
    if fmt == "bf16":
        return (np.frombuffer(block, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(BLOCK, PANEL)
    q, scale = np.empty((BLOCK, PANEL), np.float32), np.frombuffer(block[-32:], "<f2").astype(np.float32)
    for k in range(BLOCK):
        for row in range(PANEL):
            if fmt == "q8":
                q[k, row] = block[(k // 4 * PANEL + row) * 4 + k % 4] - 128
            else:
                byte = block[(k // 8 * PANEL + row) * 4 + k % 4]
                q[k, row] = (byte >> 4 if k % 8 >= 4 else byte & 15) - 8
    return q * scale


BLOCK_BYTES = {"f32": 2048, "f16": 1024, "bf16": 1024, "q8": 544, "q4": 288}


def unpack(fmt: str, rows: int, cols: int, data: bytes) -> npt.NDArray[np.float32]:
    """The inverse of pack, up to rounding."""
    nb, size = -(-cols // BLOCK), BLOCK_BYTES[fmt]
    stride = -(-nb * size // 64) * 64
    w = np.zeros((-(-rows // PANEL) * PANEL, nb * BLOCK), np.float32)
    for panel in range(len(w) // PANEL):
        for b in range(nb):
            at = panel * stride + b * size
            block = _values(fmt, data[at : at + size])
            w[panel * PANEL : (panel + 1) * PANEL, b * BLOCK : (b + 1) * BLOCK] = block.T
    return w[:rows, :cols]
