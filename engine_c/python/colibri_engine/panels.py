"""Weight matrices in libcolibri's panel layout, packed and unpacked by the library itself.

Panels of 16 rows are independent, so a matrix can be packed in slabs of any multiple of 16 rows and concatenated.
All functions release the GIL while the library works.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._colibri import ffi, lib
from .errors import EngineError

PANEL = 16  # rows
ALIGNMENT = 64  # bytes
_BUFFER_TOO_SMALL, _UNSUPPORTED = 4, 6  # colibri_status_t

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def panel_bytes(dtype: str, rows: int, cols: int) -> int:
    """Bytes of a matrix [rows, cols]. Raises EngineError for an unknown dtype or a size beyond 64 bits."""
    size = lib.colibri_panel_bytes(dtype.encode(), rows, cols) if max(rows, cols) < 1 << 63 else 0
    if not size:
        raise EngineError(_UNSUPPORTED, f"no panel layout for a {dtype} matrix [{rows}, {cols}]")
    return int(size)


def aligned(size: int) -> Bytes:
    """An uninitialised buffer of `size` bytes on a 64-byte boundary."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def pack(dtype: str, w: F32) -> Bytes:
    """Quantises w [rows, cols]. Raises EngineError if a weight is not finite or out of the format's range."""
    w = np.ascontiguousarray(w, np.float32)
    rows, cols = w.shape
    out = aligned(panel_bytes(dtype, rows, cols))
    err = _error()
    status = lib.colibri_panel_pack(dtype.encode(), rows, cols, _floats(w), ffi.from_buffer(out), err)
    _check(status, err)
    return out


def pack_quants(dtype: str, q: npt.NDArray[np.int8], scales: npt.NDArray[np.uint16]) -> Bytes:
    """Stores quantised values q [rows, cols] with f16 scale bits [rows, cols/32] as they are."""
    q, scales = np.ascontiguousarray(q, np.int8), np.ascontiguousarray(scales, np.uint16)
    rows, cols = q.shape
    out = aligned(panel_bytes(dtype, rows, cols))
    err = _error()
    status = lib.colibri_panel_pack_quants(
        dtype.encode(),
        rows,
        cols,
        ffi.from_buffer("int8_t[]", q),
        ffi.from_buffer("uint16_t[]", scales),
        ffi.from_buffer(out),
        err,
    )
    _check(status, err)
    return out


def unpack(dtype: str, rows: int, cols: int, panels: Bytes) -> F32:
    """The stored values as f32 [rows, cols]. Raises EngineError if `panels` has the wrong size."""
    if panels.size != panel_bytes(dtype, rows, cols):
        raise EngineError(_BUFFER_TOO_SMALL, f"{panels.size} bytes are no {dtype} matrix [{rows}, {cols}]")
    if panels.ctypes.data % ALIGNMENT:
        copy = aligned(panels.size)
        copy[:] = panels
        panels = copy
    w = np.empty((rows, cols), np.float32)
    err = _error()
    status = lib.colibri_panel_unpack(dtype.encode(), rows, cols, ffi.from_buffer(panels), _floats(w), err)
    _check(status, err)
    return w


def _floats(w: F32) -> Any:
    return ffi.from_buffer("float[]", w)


def _error() -> Any:
    return ffi.new("colibri_error_t *", {"struct_size": ffi.sizeof("colibri_error_t")})


def _check(status: int, err: Any) -> None:
    if status:
        message = ffi.string(err.message).decode("utf-8", "replace")
        raise EngineError(status, message or ffi.string(lib.colibri_status_text(status)).decode())
