"""The C packing functions against the numpy reading of the layouts, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
from colibri_engine import panels
from colibri_engine.errors import EngineError
from reference import panels as reference

SHAPES = [(1, 1), (16, 32), (17, 33), (33, 70), (5, 96), (48, 31)]


def weights(rows: int, cols: int, seed: int = 7) -> np.ndarray:
    """Normal values with what is awkward mixed in: a zero block, subnormal halves, halfway cases, one outlier."""
    rng = np.random.default_rng([seed, rows, cols])
    w = rng.standard_normal((rows, cols), dtype=np.float32)
    w[rows // 2] = 0
    w[0, : cols // 2] *= np.float32(1e-6)
    w[-1] = np.round(w[-1] * 8) / 16
    w[0, -1] = 100
    return w


@pytest.mark.parametrize("fmt", reference.FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_pack_gives_the_reference_bytes(fmt: str, shape: tuple[int, int]) -> None:
    w = weights(*shape)
    packed = panels.pack(fmt, w)
    assert packed.tobytes() == reference.pack(fmt, w)
    assert packed.size == panels.panel_bytes(fmt, *shape)


@pytest.mark.parametrize("fmt", reference.FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_unpack_gives_the_reference_values(fmt: str, shape: tuple[int, int]) -> None:
    data = panels.pack(fmt, weights(*shape))
    values = panels.unpack(fmt, *shape, data)
    assert values.tobytes() == reference.unpack(fmt, *shape, data.tobytes()).tobytes()


@pytest.mark.parametrize(("fmt", "low", "high"), [("q8", -128, 127), ("q4", -8, 7)])
@pytest.mark.parametrize("shape", [(16, 32), (19, 96)])
def test_quantised_blocks_are_stored_as_they_are(fmt: str, low: int, high: int, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    q = rng.integers(low, high, shape, np.int8, endpoint=True)
    scales = rng.standard_normal((shape[0], shape[1] // 32)).astype(np.float16).view(np.uint16)
    packed = panels.pack_quants(fmt, q, scales)
    assert packed.tobytes() == reference.pack_quants(fmt, q, scales)
    expected = q.astype(np.float32) * scales.view(np.float16).astype(np.float32).repeat(32, axis=1)
    assert np.array_equal(panels.unpack(fmt, *shape, packed), expected)


@pytest.mark.parametrize("fmt", reference.FORMATS)
def test_slabs_of_panels_concatenate(fmt: str) -> None:
    w = weights(50, 70)
    slabs = b"".join(panels.pack(fmt, w[row : row + 16]).tobytes() for row in range(0, 50, 16))
    assert slabs == panels.pack(fmt, w).tobytes()


@pytest.mark.parametrize("fmt", reference.FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_refused(fmt: str, bad: float) -> None:
    w = weights(20, 40)
    w[18, 39] = bad
    with pytest.raises(EngineError) as caught:
        panels.pack(fmt, w)
    assert caught.value.status == 17  # COLIBRI_WEIGHT_RANGE


def test_weights_beyond_half_precision_are_refused() -> None:
    w = np.full((16, 32), 70000, np.float32)
    with pytest.raises(EngineError):
        panels.pack("f16", w)
    assert np.array_equal(panels.unpack("f32", 16, 32, panels.pack("f32", w)), w)


def test_quants_outside_a_format_are_refused() -> None:
    q, scales = np.full((16, 32), 8, np.int8), np.zeros((16, 1), np.uint16)
    with pytest.raises(EngineError):
        panels.pack_quants("q4", q, scales)
    with pytest.raises(EngineError):
        panels.pack_quants("f16", q, scales)
    with pytest.raises(EngineError):
        panels.pack_quants("q8", q, np.full((16, 1), 0x7C00, np.uint16))  # infinite scale


@pytest.mark.parametrize(
    ("fmt", "rows", "cols"), [("q5", 16, 32), ("q8", 0, 32), ("q8", 16, 1 << 62), ("q8", 1 << 70, 1)]
)
def test_sizes_that_do_not_exist_are_refused(fmt: str, rows: int, cols: int) -> None:
    with pytest.raises(EngineError):
        panels.panel_bytes(fmt, rows, cols)


def test_unpacking_a_short_buffer_is_refused() -> None:
    with pytest.raises(EngineError):
        panels.unpack("q8", 16, 32, np.zeros(64, np.uint8))
