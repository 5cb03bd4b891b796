"""Writing a container is all or nothing; verify finds every kind of damage and names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from colibri_engine.container import MANIFEST, Manifest
from colibri_engine.convert import convert
from colibri_engine.errors import ContainerError
from colibri_engine.verify import verify
from colibri_engine.writer import ContainerWriter
from fixtures.checkpoints import LLAMA, MIXTRAL, read_container, write_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sound q4 container."""
    convert(write_checkpoint(tmp_path / "src", MIXTRAL), tmp_path / "model", "q4")
    assert verify(tmp_path / "model") == []
    return tmp_path / "model"


def only(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


# ---- all or nothing


def test_an_existing_destination_is_refused_before_any_work(model: Path, tmp_path: Path) -> None:
    before = (model / MANIFEST).read_bytes()
    with pytest.raises(ContainerError, match="--force"):
        convert(tmp_path / "no such source", model)
    assert (model / MANIFEST).read_bytes() == before


def test_force_replaces_a_model_whole(model: Path, tmp_path: Path) -> None:
    (model / "left over").write_text("of the old one")
    convert(write_checkpoint(tmp_path / "dense", LLAMA), model, "q8", force=True)
    assert Manifest.load(model).architecture == "llama"
    assert verify(model) == []
    assert only(model) == {"manifest.json", "dense.bin", "experts.bin", "config.json"}
    assert only(tmp_path) == {"src", "dense", "model"}


def test_force_takes_an_empty_folder_but_nothing_that_is_no_model(tmp_path: Path) -> None:
    src = write_checkpoint(tmp_path / "src", LLAMA)
    (tmp_path / "empty").mkdir()
    convert(src, tmp_path / "empty", force=True)
    with pytest.raises(ContainerError, match="not a model container"):
        convert(src, src, force=True)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ContainerError, match="not a folder"):
        convert(src, tmp_path / "file", force=True)
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with pytest.raises(ContainerError, match="not a folder"):
        convert(src, tmp_path / "link", force=True)
    assert (tmp_path / "file").read_text() == "precious"


def test_a_failed_replacement_keeps_the_old_model(model: Path, tmp_path: Path) -> None:
    src = write_checkpoint(tmp_path / "dense", LLAMA)
    before = (model / MANIFEST).read_bytes()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(src, model, force=True, advance=stop)
    assert (model / MANIFEST).read_bytes() == before
    assert verify(model) == []
    assert only(tmp_path) == {"src", "dense", "model"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_an_interruption_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    src = write_checkpoint(tmp_path / "src", MIXTRAL)

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise error

    with pytest.raises(error):
        convert(src, tmp_path / "dst", advance=stop)
    assert only(tmp_path) == {"src"}


# In a process of its own: the limit would also hit a test report that is being written to a file.
FULL_DISK = """
import resource, signal, sys
from collections.abc import Callable
from pathlib import Path
from colibri_engine.convert.pipeline import convert
from colibri_engine.errors import ContainerError
src, dst, size = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    convert(src, dst, "f32")
except ContainerError as e:
    print("refused:", e)
"""


@pytest.mark.parametrize("limit", [0, 100, 4096, 20000])
def test_a_full_disk_leaves_nothing(tmp_path: Path, limit: int) -> None:
    """Files may grow to so many bytes only: writing more fails like a full disk."""
    src = write_checkpoint(tmp_path / "src", MIXTRAL)
    command = [sys.executable, "-c", FULL_DISK, src, tmp_path / "dst", str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("refused:"), done.stderr
    assert "cannot be written" in done.stdout
    assert only(tmp_path) == {"src"}


def test_a_disk_that_is_too_small_is_noticed_first(tmp_path: Path) -> None:
    with pytest.raises(ContainerError, match="free"), ContainerWriter(tmp_path / "dst") as writer:
        writer.reserve(1 << 62)
    assert only(tmp_path) == set()


def test_a_destination_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    src = write_checkpoint(tmp_path / "src", LLAMA)
    with pytest.raises(ContainerError, match="cannot be written"):
        convert(src, tmp_path / "file" / "dst")


def test_missing_parents_are_made_and_the_folder_is_readable(tmp_path: Path) -> None:
    convert(write_checkpoint(tmp_path / "src", LLAMA), tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o755


# ---- verify


def damage(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as f:
        f.seek(offset)
        f.write(data)


def edit(model: Path, change: Callable[[dict[str, Any]], None], renew_id: bool = True) -> None:
    """Changes the manifest; with renew_id its model_id is made to fit, so that only the change is at fault."""
    raw = json.loads((model / MANIFEST).read_text())
    change(raw)
    (model / MANIFEST).write_text(json.dumps(raw))
    if renew_id:
        raw["model_id"] = Manifest.load(model).computed_id()
        (model / MANIFEST).write_text(json.dumps(raw))


def findings(model: Path) -> list[tuple[str, str | None]]:
    return [(f.path.name, f.item) for f in verify(model)]


def test_a_flipped_bit_is_found_in_every_tensor(model: Path) -> None:
    manifest, _ = read_container(model)
    for t in manifest.tensors[::3]:
        path, at = model / manifest.files[t.file][0], t.offset + t.bytes // 2
        old = path.read_bytes()[at]
        damage(path, at, bytes([old ^ 1]))
        assert findings(model) == [(path.name, t.name)]
        damage(path, at, bytes([old]))
    assert findings(model) == []


@pytest.mark.parametrize("name", ["dense.bin", "experts.bin"])
def test_file_sizes(model: Path, name: str) -> None:
    size = (model / name).stat().st_size
    for wrong in (0, size - 1, size + 1):
        os.truncate(model / name, wrong)
        assert findings(model) == [(name, None)]
    (model / name).unlink()
    assert findings(model) == [(name, None)]
    (model / name).mkdir()
    assert findings(model) == [(name, None)]


@pytest.mark.parametrize("role", ["embed", "ffn_down", "final_norm", "router"])
def test_values_that_are_no_numbers(model: Path, role: str) -> None:
    """A scale or value made NaN, with checksum and model_id renewed as an attacker would."""
    import hashlib

    manifest, _ = read_container(model)
    t = next(t for t in manifest.tensors if t.role == role)
    path = model / manifest.files[t.file][0]
    if t.dtype == "f32":
        damage(path, t.offset, np.float32(np.nan).tobytes())
    else:
        damage(path, t.offset + {"q8": 512, "q4": 256}[t.dtype], np.float16(np.nan).tobytes())
    stored = path.read_bytes()[t.offset : t.offset + t.bytes]

    def renew(raw: dict[str, Any]) -> None:
        entry = next(e for e in raw["tensors"] if e["name"] == t.name)
        entry["sha256"] = hashlib.sha256(stored).hexdigest()

    edit(model, renew)
    assert findings(model) == [(path.name, t.name)]
    assert "NaN" in str(verify(model)[0])


def row(raw: dict[str, Any], role: str) -> dict[str, Any]:
    return next(t for t in raw["tensors"] if t["role"] == role)


STRUCTURE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing tensor": (lambda raw: raw["tensors"].remove(row(raw, "attn_k")), "model.layers.0.self_attn.k_proj.weight"),
    "second tensor": (lambda raw: raw["tensors"].append(row(raw, "head")), "lm_head.weight"),
    "unknown role": (lambda raw: row(raw, "router").update(role="gate"),
                     "model.layers.0.block_sparse_moe.gate.weight"),
    "shape": (lambda raw: row(raw, "attn_o").update(shape=[64, 32]), "model.layers.0.self_attn.o_proj.weight"),
    "bytes": (lambda raw: row(raw, "attn_v").update(bytes=64), "model.layers.0.self_attn.v_proj.weight"),
    "offset outside": (lambda raw: row(raw, "final_norm").update(offset=1 << 40), "model.norm.weight"),
    "overlap": (lambda raw: row(raw, "head").update(offset=0), "lm_head.weight"),
    "misaligned": (lambda raw: row(raw, "final_norm").update(offset=row(raw, "final_norm")["offset"] + 4),
                   "model.norm.weight"),
    "router not f32": (lambda raw: row(raw, "router").update(dtype="f16"),
                       "model.layers.0.block_sparse_moe.gate.weight"),
    "wrong file": (lambda raw: row(raw, "ffn_norm").update(file=1),
                   "model.layers.0.post_attention_layernorm.weight"),
    "no such file": (lambda raw: row(raw, "ffn_norm").update(file=7),
                     "model.layers.0.post_attention_layernorm.weight"),
    "expert torn apart": (lambda raw: row(raw, "ffn_up").update(offset=row(raw, "ffn_up")["offset"] + 64),
                          "model.layers.0.block_sparse_moe.experts.0.w3.weight"),
    "file name": (lambda raw: raw["files"][0].update(name="../dense.bin"), "files"),
    "file list": (lambda raw: raw["files"].pop(), "files"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "item"), STRUCTURE.values(), ids=STRUCTURE)
def test_a_table_that_does_not_fit(model: Path, change: Callable[[dict[str, Any]], Any], item: str) -> None:
    edit(model, change)
    found = findings(model)
    assert (MANIFEST, item) in found


def test_a_geometry_that_promises_more(model: Path) -> None:
    edit(model, lambda raw: raw["geometry"].update(layers=4096, experts=65536))
    assert 0 < len(verify(model)) < 100


def test_a_model_id_that_is_not_this_models(model: Path) -> None:
    edit(model, lambda raw: raw.update(model_id="0" * 64), renew_id=False)
    assert findings(model) == [(MANIFEST, "model_id")]


@pytest.mark.parametrize(("change", "item"), [
    (lambda raw: raw.pop("geometry"), "geometry"),
    (lambda raw: raw["geometry"].update(hidden=64.0), "geometry.hidden"),
    (lambda raw: raw["geometry"].update(hidden=-1), "geometry.hidden"),
    (lambda raw: raw["geometry"].update(hidden=1 << 60), "geometry.hidden"),
    (lambda raw: raw["geometry"].update(hidden=True), "geometry.hidden"),
    (lambda raw: raw["geometry"].update(kv_heads=3), "geometry"),
    (lambda raw: raw["geometry"].pop("window"), "geometry.window"),
    (lambda raw: raw.update(version=2), "format"),
    (lambda raw: raw.update(format="gguf"), "format"),
    (lambda raw: raw.update(architecture="gpt"), "architecture"),
    (lambda raw: raw.update(tensors={}), "tensors"),
    (lambda raw: raw["tensors"][0].update(dtype="q3"), "tensors[0].(model.embed_tokens.weight).dtype"),
    (lambda raw: raw["tensors"][0].update(layout="col"), "tensors[0].(model.embed_tokens.weight).layout"),
    (lambda raw: raw["tensors"][0].update(shape=[0, 64]), "tensors[0].(model.embed_tokens.weight).shape"),
    (lambda raw: raw["tensors"][0].update(shape=[2**60, 64]), "tensors[0].(model.embed_tokens.weight).shape"),
    (lambda raw: raw["tensors"][0].update(offset=-64), "tensors[0].(model.embed_tokens.weight).offset"),
    (lambda raw: raw["tensors"][0].pop("sha256"), "tensors[0].(model.embed_tokens.weight).sha256"),
])  # fmt: skip
def test_manifests_that_cannot_be_read_name_the_field(
    model: Path, change: Callable[[dict[str, Any]], Any], item: str
) -> None:
    edit(model, change, renew_id=False)
    with pytest.raises(ContainerError) as caught:
        verify(model)
    assert (caught.value.path.name, caught.value.item) == (MANIFEST, item)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100000, "\xff"])
def test_manifests_that_are_no_json(model: Path, text: str) -> None:
    (model / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(ContainerError, match="JSON"):
        verify(model)


def test_a_folder_without_manifest_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ContainerError):
        verify(tmp_path)
    with pytest.raises(ContainerError, match="not a folder"):
        verify(tmp_path / "nothing")


def test_verify_tells_how_far_it_is(model: Path) -> None:
    steps: list[int] = []
    verify(model, steps.append)
    assert sum(steps) == sum(t.bytes for t in Manifest.load(model).tensors)
