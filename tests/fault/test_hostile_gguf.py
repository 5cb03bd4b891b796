"""GGUF files that are damaged or built to harm; see test_hostile_sources.py for what is asked of each case."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from colibri_engine.convert import convert
from colibri_engine.errors import ConversionError
from fixtures.checkpoints import LLAMA, gguf_tensors, random_tensors, write_gguf
from fixtures.checkpoints import MIXTRAL as CONFIG
from fixtures.refusal import patch, refused


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", CONFIG, gguf_tensors(CONFIG, random_tensors(CONFIG)))


def after(path: Path, text: bytes) -> int:
    """Offset behind the first occurrence of a string."""
    return path.read_bytes().index(text) + len(text)


def test_gguf_truncated_at_every_step(gguf: Path) -> None:
    whole = gguf.read_bytes()
    header = whole.index(b"blk.1.ffn_norm.weight")
    for size in [*range(0, len(whole), 4096), *range(1, header, 37), len(whole) - 1]:
        gguf.write_bytes(whole[:size])
        with pytest.raises(ConversionError) as caught:
            convert(gguf, gguf.parent / "dst")
        assert caught.value.path == gguf, size
        assert [p.name for p in gguf.parent.iterdir()] == ["model.gguf"], size


@pytest.mark.parametrize(("at", "data"), [
    (0, b"GGML"),
    (0, b"FUGG"),
    (4, struct.pack("<I", 1)),
    (4, struct.pack(">I", 3)),
    (8, struct.pack("<Q", 2**64 - 1)),
    (16, struct.pack("<Q", 2**64 - 1)),
    (8, struct.pack("<Q", 2**40)),
    (16, struct.pack("<Q", 2**40)),
    (24, struct.pack("<Q", 2**63)),
])  # fmt: skip
def test_gguf_heads_that_make_no_sense(gguf: Path, at: int, data: bytes) -> None:
    patch(gguf, at, data)
    refused(gguf, gguf, None)


def test_gguf_empty_directory_and_missing(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    refused(path, path, None)
    path.write_bytes(b"")
    refused(path, path, None)


@pytest.mark.parametrize("kind", [9, 13, 255, 2**32 - 1])
def test_gguf_metadata_of_unknown_types(gguf: Path, kind: int) -> None:
    patch(gguf, after(gguf, b"llama.block_count"), struct.pack("<I", kind))
    with pytest.raises(ConversionError) as caught:
        convert(gguf, gguf.parent / "dst")
    assert caught.value.path == gguf


# A table row: name, u32 n_dims, u64 dims, u32 type, u64 offset.
TENSOR = b"output_norm.weight"


@pytest.mark.parametrize(("at", "data"), [
    (0, struct.pack("<I", 0)),
    (0, struct.pack("<I", 5)),
    (0, struct.pack("<I", 2**32 - 1)),
    (4, struct.pack("<Q", 0)),
    (4, struct.pack("<Q", 2**64 - 64)),
    (4, struct.pack("<Q", 2**52)),
    (4, struct.pack("<Q", 63)),
    (12, struct.pack("<I", 77)),
    (12, struct.pack("<I", 31)),
    (16, struct.pack("<Q", 2**64 - 32)),
    (16, struct.pack("<Q", 2**40)),
    (16, struct.pack("<Q", 33)),
], ids=["no dims", "5 dims", "many dims", "zero", "wraps", "huge", "wrong", "unknown type", "removed type",
        "offset wraps", "offset outside", "offset unaligned"])  # fmt: skip
def test_gguf_table_rows_that_make_no_sense(gguf: Path, at: int, data: bytes) -> None:
    patch(gguf, after(gguf, TENSOR) + at, data)
    refused(gguf, gguf, TENSOR.decode())


def test_gguf_overlapping_tensors(gguf: Path) -> None:
    patch(gguf, after(gguf, TENSOR) + 16, struct.pack("<Q", 0))
    with pytest.raises(ConversionError, match="overlaps"):
        convert(gguf, gguf.parent / "dst")


def test_gguf_a_tensor_twice(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", LLAMA, gguf_tensors(LLAMA, random_tensors(LLAMA)))
    patch(path, after(path, b"blk.0.attn_norm.weight") - 22, b"blk.1.attn_norm.weight")
    assert "twice" in refused(path, path, "blk.1.attn_norm.weight")


def test_gguf_a_key_twice(gguf: Path) -> None:
    patch(gguf, after(gguf, b"llama.vocab_size") - 16, b"llama.block_size")
    at = after(gguf, b"llama.block_count") - 17
    raw = gguf.read_bytes()
    one = raw[at - 8 : at + 17 + 8]
    gguf.write_bytes(raw[:16] + struct.pack("<Q", struct.unpack("<Q", raw[16:24])[0] + 1) + one + raw[24:])
    assert "twice" in refused(gguf, gguf, "llama.block_count")


@pytest.mark.parametrize("missing", ["token_embd.weight", "blk.1.ffn_down_exps.weight", "blk.0.ffn_gate_inp.weight"])
def test_gguf_a_missing_tensor(tmp_path: Path, missing: str) -> None:
    tensors = gguf_tensors(CONFIG, random_tensors(CONFIG))
    del tensors[missing]
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors)
    expected = {"blk.1.ffn_down_exps.weight": "blk.1.ffn_down.0.weight"}.get(missing, missing)
    refused(path, path, expected)


def test_gguf_one_expert_missing(tmp_path: Path) -> None:
    tensors = gguf_tensors(CONFIG, random_tensors(CONFIG), stacked=False)
    del tensors["blk.1.ffn_up.2.weight"]
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors)
    refused(path, path, "blk.1.ffn_up.2.weight")


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.0.attn_q.weight", "blk.1.ffn_up_exps.weight"])
def test_gguf_weights_that_are_no_numbers(tmp_path: Path, name: str) -> None:
    tensors = gguf_tensors(CONFIG, random_tensors(CONFIG))
    tensors[name].reshape(-1)[5] = np.nan
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors)
    refused(path, path, name)


def test_gguf_scales_that_are_no_numbers(tmp_path: Path) -> None:
    """Repacked blocks keep their scale; an infinite one must not slip through."""
    from colibri_engine.convert.gguf_file import open_gguf
    from gguf import GGMLQuantizationType

    path = write_gguf(
        tmp_path / "m.gguf", CONFIG, gguf_tensors(CONFIG, random_tensors(CONFIG)), GGMLQuantizationType.Q8_0
    )
    patch(path, open_gguf(path)[1]["blk.0.attn_v.weight"].offset, struct.pack("<e", float("inf")))
    refused(path, path, "blk.0.attn_v.weight")
