"""Sources that are damaged or built to harm: each is a ConversionError naming the file (and the tensor or field where
there is one), exit code 2 on the command line, no traceback, and nothing left behind."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from colibri_engine.convert import convert
from colibri_engine.errors import ConversionError
from fixtures.checkpoints import (
    LLAMA,
    MIXTRAL,
    random_tensors,
    raw_safetensors,
    write_checkpoint,
)
from fixtures.refusal import refused

CONFIG = MIXTRAL
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
NORM, QUERY = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
Header = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "src", CONFIG)


def split(path: Path) -> tuple[Header, bytes]:
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def rewrite(folder: Path, change: Callable[[Header], Any], data: Callable[[bytes], bytes] = bytes) -> Path:
    """Changes the header (and data) of the folder's weights file."""
    path = folder / "model.safetensors"
    header, body = split(path)
    header = change(header) or header
    path.write_bytes(raw_safetensors(header, data(body)))
    return path


# ---- safetensors: the file


def test_truncated_at_every_step(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in [*range(0, len(whole), 4096), 7, 8, 9, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ConversionError) as caught:
            convert(folder, folder.parent / "dst")
        assert caught.value.path == path, size
        assert [p.name for p in folder.parent.iterdir()] == ["src"], size


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**32, 100_000_001])
def test_header_lengths_beyond_the_file(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    assert "header length" in refused(folder, path, None)


@pytest.mark.parametrize("text", [
    b"", b"nonsense", b"[]", b"null", b"\xff\xfe", b'{"a": 1', b"{" * 50000, b'{"a":' * 50000, b'{"a": NaN}',
])  # fmt: skip
def test_headers_that_are_no_json_object(folder: Path, text: bytes) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(raw_safetensors(text, b""))
    refused(folder, path, None)


def test_a_tensor_twice(folder: Path) -> None:
    path = folder / "model.safetensors"
    header, body = split(path)
    text = json.dumps(header).encode()
    twice = text[:-1] + b"," + json.dumps({NORM: header[NORM]}).encode()[1:]
    path.write_bytes(raw_safetensors(twice, body))
    assert NORM in refused(folder, path, None)


def test_bytes_that_belong_to_no_tensor(folder: Path) -> None:
    path = rewrite(folder, lambda h: h, lambda body: body + b"extra")
    assert "belong to no tensor" in refused(folder, path, None)


# ---- safetensors: one entry

ENTRIES: dict[str, Any] = {
    "not an object": 7,
    "no dtype": {"dtype": None},
    "unknown dtype": {"dtype": "Q4"},
    "dtype not text": {"dtype": ["F32"]},
    "wider dtype": {"dtype": "F64"},
    "narrower dtype": {"dtype": "I16"},
    "shape wraps to the same bytes": {"shape": [64, 2**62 + 1]},
    "shape wraps to zero": {"shape": [2**32, 2**32]},
    "negative": {"shape": [-64]},
    "two negatives": {"shape": [-8, -8]},
    "float": {"shape": [64.0]},
    "boolean": {"shape": [True, 64]},
    "text": {"shape": ["64"]},
    "huge": {"shape": [10**400]},
    "shape no list": {"shape": 64},
    "many dimensions": {"shape": [1] * 100 + [64]},
    "offsets reversed": {"data_offsets": [256, 0]},
    "offsets negative": {"data_offsets": [-256, 0]},
    "offsets float": {"data_offsets": [0.0, 256.0]},
    "offsets too few": {"data_offsets": [0]},
    "offsets missing": {"data_offsets": None},
    "offsets huge": {"data_offsets": [2**63, 2**63 + 256]},
}


@pytest.mark.parametrize("change", ENTRIES.values(), ids=ENTRIES)
def test_entries_that_make_no_sense(folder: Path, change: Any) -> None:
    sound = {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}

    def edit(header: Header) -> None:
        header[NORM] = sound | change if isinstance(change, dict) else change

    path = rewrite(folder, edit)
    refused(folder, path, NORM)


def shifted(header: Header, name: str, begin: int) -> None:
    old = header[name]["data_offsets"]
    header[name]["data_offsets"] = [begin, begin + old[1] - old[0]]


def test_offsets_outside_the_file(folder: Path) -> None:
    path = rewrite(folder, lambda h: shifted(h, QUERY, 1 << 40))
    refused(folder, path, QUERY)


def test_overlapping_offsets(folder: Path) -> None:
    def edit(header: Header) -> None:
        shifted(header, QUERY, header[QUERY]["data_offsets"][0] + 4)

    assert "data_offsets" in refused(folder, rewrite(folder, edit), QUERY)


def test_aliased_tensors(folder: Path) -> None:
    """Two names for the same bytes."""

    def edit(header: Header) -> None:
        header["model.layers.1.self_attn.q_proj.weight"]["data_offsets"] = header[QUERY]["data_offsets"]

    path = rewrite(folder, edit)
    with pytest.raises(ConversionError, match="overlaps"):
        convert(folder, folder.parent / "dst")
    assert path.exists()


@pytest.mark.parametrize(("dtype", "kind"), [("I16", np.int16), ("F64", np.float64), ("I32", np.int32),
                                             ("F8_E4M3", np.uint8), ("BOOL", np.uint8)])  # fmt: skip
def test_well_formed_tensors_of_other_dtypes(tmp_path: Path, dtype: str, kind: Any) -> None:
    """Every byte accounted for, but no weights we could mean."""
    header, body = {}, b""
    for name, w in random_tensors(LLAMA).items():
        raw = w.astype(kind if name == QUERY else "<f4").tobytes()
        offsets = [len(body), len(body) + len(raw)]
        header[name] = {"dtype": dtype if name == QUERY else "F32", "shape": list(w.shape), "data_offsets": offsets}
        body += raw
    src = write_checkpoint(tmp_path / "src", LLAMA)
    (src / "model.safetensors").write_bytes(raw_safetensors(header, body))
    assert dtype in refused(src, src / "model.safetensors", QUERY)


# ---- safetensors: the model


@pytest.mark.parametrize("name", [NORM, QUERY, EXPERT, "model.layers.0.block_sparse_moe.gate.weight", "lm_head.weight"])
def test_a_missing_tensor(tmp_path: Path, name: str) -> None:
    tensors = random_tensors(CONFIG)
    del tensors[name]
    src = write_checkpoint(tmp_path / "src", CONFIG, tensors)
    assert "missing" in refused(src, src, name)


def test_one_expert_missing(tmp_path: Path) -> None:
    tensors = {n: w for n, w in random_tensors(CONFIG).items() if ".layers.1.block_sparse_moe.experts.1." not in n}
    src = write_checkpoint(tmp_path / "src", CONFIG, tensors)
    refused(src, src, "model.layers.1.block_sparse_moe.experts.1.w1.weight")


def test_experts_nobody_asked_for(tmp_path: Path) -> None:
    src = write_checkpoint(tmp_path / "src", CONFIG)
    (src / "config.json").write_text(json.dumps(CONFIG | {"num_local_experts": 2}))
    refused(src, src / "model.safetensors", "model.layers.0.block_sparse_moe.gate.weight")


@pytest.mark.parametrize("shape", [(65,), (64, 1), (1, 64), (32, 2), (0,), ()])
def test_a_wrong_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = random_tensors(CONFIG) | {NORM: np.zeros(shape, np.float32)}
    src = write_checkpoint(tmp_path / "src", CONFIG, tensors)
    assert "shape" in refused(src, src / "model.safetensors", NORM)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [NORM, QUERY, EXPERT, "model.layers.0.block_sparse_moe.gate.weight"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_weights_that_are_no_numbers(tmp_path: Path, bad: float, name: str, dtype: str) -> None:
    tensors = random_tensors(CONFIG)
    tensors[name].reshape(-1)[-1] = bad
    src = write_checkpoint(tmp_path / "src", CONFIG, tensors, dtype)
    refused(src, src / "model.safetensors", name)


# ---- the folder


def test_an_empty_folder_and_no_folder(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    refused(tmp_path / "src", tmp_path / "src" / "config.json", None)
    refused(tmp_path / "nothing", tmp_path / "nothing", None)
    (tmp_path / "model.bin").write_bytes(b"pickle")
    refused(tmp_path / "model.bin", tmp_path / "model.bin", None)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_files_that_are_not_there_empty_or_not_files(folder: Path, name: str) -> None:
    path = folder / name
    path.write_bytes(b"")
    refused(folder, path, None)
    path.unlink()
    refused(folder, path, None)
    path.mkdir()
    assert "directory" in refused(folder, path, None)
    path.rmdir()
    os.mkfifo(path)
    assert "regular" in refused(folder, path, None)
    path.unlink()
    path.symlink_to(path)
    refused(folder, path, None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_unreadable_files(folder: Path, name: str) -> None:
    (folder / name).chmod(0)
    assert "Permission" in refused(folder, folder / name, None)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b'{"vocab_size": NaN}', b'{"a": 1, "a": 1}', b"[" * 99999])
def test_a_config_that_is_no_json_object(folder: Path, text: bytes) -> None:
    (folder / "config.json").write_bytes(text)
    refused(folder, folder / "config.json", None)


@pytest.mark.parametrize(("field", "value"), [
    ("hidden_size", "64"), ("hidden_size", 64.5), ("hidden_size", [64]), ("hidden_size", True), ("hidden_size", 0),
    ("num_local_experts", -3), ("rope_theta", "big"), ("rms_norm_eps", {}), ("model_type", 3), ("head_dim", 1e400),
])  # fmt: skip
def test_a_config_of_wrong_types(folder: Path, field: str, value: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {field: value}).replace("Infinity", "1e400"))
    refused(folder, folder / "config.json", field)


@pytest.mark.parametrize("field", [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_local_experts", "num_experts_per_tok", "max_position_embeddings", "head_dim",
])  # fmt: skip
@pytest.mark.parametrize("value", [2**31, 2**63, 2**64 + 64, 10**300])
def test_a_config_of_huge_numbers(folder: Path, field: str, value: int) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {field: value}))
    refused(folder, folder / "config.json", "geometry")


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"])
def test_a_config_that_promises_a_larger_model(folder: Path, field: str) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {field: 4096}))
    with pytest.raises(ConversionError):
        convert(folder, folder.parent / "dst")
    assert [p.name for p in folder.parent.iterdir()] == ["src"]


# ---- the index of a sharded folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "src", CONFIG, shards=2)


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    path = folder / "model.safetensors.index.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    return path


def test_a_missing_shard(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.unlink()
    refused(sharded, shard, None)


def test_a_truncated_shard(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 4)
    with pytest.raises(ConversionError, match="truncated") as caught:
        convert(sharded, sharded.parent / "dst")
    assert caught.value.path == shard


def test_a_tensor_the_index_puts_elsewhere(sharded: Path) -> None:
    def move(raw: dict[str, Any]) -> None:
        other = {f"model-0000{i}-of-00002.safetensors": f"model-0000{3 - i}-of-00002.safetensors" for i in (1, 2)}
        raw["weight_map"][NORM] = other[raw["weight_map"][NORM]]

    refused(sharded, edit_index(sharded, move), NORM)


def test_a_tensor_the_index_only_promises(sharded: Path) -> None:
    def add(raw: dict[str, Any]) -> None:
        raw["weight_map"]["extra"] = "model-00001-of-00002.safetensors"

    edit_index(sharded, add)
    refused(sharded, sharded / "model-00001-of-00002.safetensors", "extra")


@pytest.mark.parametrize(
    "shard", ["../src/model-00001-of-00002.safetensors", "/etc/passwd", "config.json", "", 7, None]
)
def test_shards_outside_the_folder(sharded: Path, shard: Any) -> None:
    refused(sharded, edit_index(sharded, lambda raw: raw["weight_map"].update({NORM: shard})), NORM)


@pytest.mark.parametrize("value", [[], "all", 3])
def test_a_weight_map_that_is_none(sharded: Path, value: Any) -> None:
    refused(sharded, edit_index(sharded, lambda raw: raw.update(weight_map=value)), "weight_map")
