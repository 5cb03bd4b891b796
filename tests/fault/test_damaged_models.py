"""Model folders that are missing, damaged or not what they seem: opening names the file and never crashes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from colibri_engine import Engine, EngineError
from colibri_engine._colibri import lib
from fixtures.models import Models

VOCAB = 40
TEXT = [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture(scope="module")
def folder(models: Models) -> Path:
    return models.random({"vocab": VOCAB})


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The model folder, to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


def refused(folder: Path, *words: str) -> EngineError:
    """Opening fails with an EngineError whose text has every word."""
    with pytest.raises(EngineError) as caught:
        Engine.open(folder)
    for word in words:
        assert word in str(caught.value)
    return caught.value


def test_a_missing_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere/manifest.json")


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x" * 100)
    refused(tmp_path / "model.bin", "model.bin/manifest.json")


@pytest.mark.parametrize("name", ["manifest.json", "dense.bin", "experts.bin"])
def test_a_missing_file(copy: Path, name: str) -> None:
    (copy / name).unlink()
    refused(copy, name)


@pytest.mark.parametrize("name", ["manifest.json", "dense.bin", "experts.bin"])
def test_a_folder_instead_of_a_file(copy: Path, name: str) -> None:
    (copy / name).unlink()
    (copy / name).mkdir()
    refused(copy, name)


@pytest.mark.parametrize("name", ["dense.bin", "experts.bin"])
@pytest.mark.parametrize("step", [0, 1, 4096, -4096, -1])
def test_a_truncated_file(copy: Path, name: str, step: int) -> None:
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data[:step])
    refused(copy, name)


def test_a_file_with_more_at_its_end(copy: Path) -> None:
    with open(copy / "dense.bin", "ab") as f:
        f.write(b"x")
    refused(copy, "dense.bin")


def test_every_truncation_of_the_manifest(copy: Path) -> None:
    text = (copy / "manifest.json").read_bytes().rstrip()
    for size in [*range(0, 200), *range(200, len(text), 97), len(text) - 1]:
        (copy / "manifest.json").write_bytes(text[:size])
        refused(copy, "manifest.json")


@pytest.mark.parametrize("garbage", [b"\0" * 64, b"\xff\xfe" * 40, b"[]", b"{}", b"null", b"hello", b"[" * 5000])
def test_a_manifest_of_garbage(copy: Path, garbage: bytes) -> None:
    (copy / "manifest.json").write_bytes(garbage)
    refused(copy, "manifest.json")


def test_garbage_after_a_good_files_list(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    files = json.dumps({"files": manifest["files"]})
    for tail in (', "geometry": }', ', "geometry": [1]}', ', "quantization": 3}', "", '} {"x": 1}'):
        (copy / "manifest.json").write_text(files[:-1] + tail)
        refused(copy, "manifest.json")


def edited(copy: Path, **fields: Any) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | fields))


def test_an_unknown_architecture(copy: Path) -> None:
    edited(copy, architecture="perceiver")
    assert refused(copy, str(copy), "perceiver").status == lib.COLIBRI_UNSUPPORTED


def test_a_missing_tensor_is_named_with_its_file(copy: Path) -> None:
    tensors = json.loads((copy / "manifest.json").read_text())["tensors"]
    edited(copy, tensors=[t for t in tensors if t["role"] != "attn_o"])
    assert refused(copy, str(copy / "manifest.json"), "attn_o").status == lib.COLIBRI_TENSOR


def test_bytes_do_not_matter_to_opening(copy: Path) -> None:
    """Checksums are `colibrid verify`'s; NaN weights end in an error that names the sequence, not in tokens."""
    size = (copy / "dense.bin").stat().st_size
    (copy / "dense.bin").write_bytes(b"\xff" * size)
    with Engine.open(copy) as engine, pytest.raises(EngineError, match="NaN or infinite") as caught:
        engine.logits(TEXT)
    assert caught.value.status == lib.COLIBRI_NON_FINITE


def test_a_folder_whose_name_is_no_text(folder: Path, tmp_path: Path) -> None:
    odd = tmp_path / "mod\udce9le"
    shutil.copytree(folder, odd)
    with Engine.open(odd) as engine:
        assert engine.info.vocab == VOCAB
