"""Hugging Face folders become containers that hold the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from colibri_engine.convert import convert
from colibri_engine.errors import ConversionError
from colibri_engine.geometry import POLICY
from colibri_engine.verify import verify
from fixtures.checkpoints import LLAMA, MIXTRAL, random_tensors, read_container, write_checkpoint

MODELS = {"mixtral": MIXTRAL, "llama": LLAMA, "tied": MIXTRAL | {"tie_word_embeddings": True}}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_every_tensor_arrives_exactly(tmp_path: Path, config: dict, dtype: str) -> None:
    source = random_tensors(config)
    write_checkpoint(tmp_path / "src", config, source, dtype)
    convert(tmp_path / "src", tmp_path / "dst", "f32")
    manifest, stored = read_container(tmp_path / "dst")
    assert verify(tmp_path / "dst") == []
    assert stored.keys() == source.keys() | {"rope_freqs"}
    assert all(np.array_equal(stored[name], source[name]) for name in source)
    assert manifest.geometry.tied_head == config["tie_word_embeddings"]
    assert manifest.geometry.head_dim == 16


@pytest.mark.parametrize("fmt", POLICY)
def test_formats_follow_the_policy_table(tmp_path: Path, fmt: str) -> None:
    source = random_tensors(MIXTRAL)
    write_checkpoint(tmp_path / "src", MIXTRAL, source)
    convert(tmp_path / "src", tmp_path / "dst", fmt)
    manifest, stored = read_container(tmp_path / "dst")
    expert, dense = {"q4": ("q4", "q8")}.get(fmt, (fmt, fmt))
    for t in manifest.tensors:
        always = t.role in ("router", "rope_freqs") or t.role.endswith("norm")
        assert t.dtype == ("f32" if always else expert if t.expert >= 0 else dense), t.name
    step = {"f32": 0, "f16": 0, "bf16": 0, "q8": 0.5 / 127, "q4": 0.5 / 8}
    for t in manifest.tensors:
        if t.role != "rope_freqs":
            error = np.abs(stored[t.name] - source[t.name]).max()
            assert error <= step[t.dtype] * 1.26, t.name  # half a step of the largest value; q4 clips at +7 of 8


def test_experts_are_single_extents_in_order(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", MIXTRAL)
    convert(tmp_path / "src", tmp_path / "dst", "q4")
    manifest, _ = read_container(tmp_path / "dst")
    experts = [t for t in manifest.tensors if t.file == 1]
    order = [(layer, e, r) for layer in range(2) for e in range(3) for r in ("ffn_gate", "ffn_up", "ffn_down")]
    assert [(t.layer, t.expert, t.role) for t in experts] == order
    for gate, up, down in zip(experts[0::3], experts[1::3], experts[2::3], strict=True):
        assert gate.offset % 4096 == 0
        assert up.offset == gate.offset + gate.bytes
        assert down.offset == up.offset + up.bytes


def test_shards_and_stacked_experts_give_the_same_model(tmp_path: Path) -> None:
    source = random_tensors(MIXTRAL)
    stacked = {name: w for name, w in source.items() if "block_sparse_moe" not in name}
    for layer in range(2):
        old, new = f"model.layers.{layer}.block_sparse_moe.", f"model.layers.{layer}.mlp."
        experts = [[source[f"{old}experts.{e}.{w}.weight"] for w in ("w1", "w3", "w2")] for e in range(3)]
        stacked[new + "gate.weight"] = source[old + "gate.weight"]
        stacked[new + "experts.gate_up_proj"] = np.stack([np.concatenate([w1, w3]) for w1, w3, _ in experts])
        stacked[new + "experts.down_proj"] = np.stack([w2 for _, _, w2 in experts])
    write_checkpoint(tmp_path / "single", MIXTRAL, source)
    write_checkpoint(tmp_path / "sharded", MIXTRAL, source, shards=3)
    write_checkpoint(tmp_path / "stacked", MIXTRAL, stacked)
    ids = {
        convert(tmp_path / name, tmp_path / f"{name}-out", "q4").manifest.model_id
        for name in ("single", "sharded", "stacked")
    }
    assert len(ids) == 1


def test_model_id_changes_with_a_weight_and_with_the_geometry(tmp_path: Path) -> None:
    source = random_tensors(MIXTRAL)
    first = convert(write_checkpoint(tmp_path / "a", MIXTRAL, source), tmp_path / "a-out", "f32").manifest.model_id
    longer = MIXTRAL | {"max_position_embeddings": 256}
    second = convert(write_checkpoint(tmp_path / "b", longer, source), tmp_path / "b-out", "f32").manifest.model_id
    source["model.norm.weight"][0] += 1
    third = convert(write_checkpoint(tmp_path / "c", MIXTRAL, source), tmp_path / "c-out", "f32").manifest.model_id
    assert len({first, second, third}) == 3


def test_what_belongs_to_the_model_travels_along(tmp_path: Path) -> None:
    src = write_checkpoint(tmp_path / "src", MIXTRAL)
    (src / "tokenizer.json").write_text("{}")
    (src / "chat_template.jinja").write_text("{{ messages }}")
    (src / "generation_config.json").write_text('{"eos_token_id": 2}')
    (src / "notes.txt").write_text("not part of it")
    report = convert(src, tmp_path / "dst")
    assert report.warnings == ()
    names = {p.name for p in (tmp_path / "dst").iterdir()}
    assert names == {
        "manifest.json", "dense.bin", "experts.bin", "config.json",
        "tokenizer.json", "chat_template.jinja", "generation_config.json",
    }  # fmt: skip
    assert json.loads((tmp_path / "dst" / "config.json").read_text()) == MIXTRAL


def test_a_missing_tokenizer_is_said(tmp_path: Path) -> None:
    report = convert(write_checkpoint(tmp_path / "src", LLAMA), tmp_path / "dst")
    assert "tokenizer.json" in report.warnings[0]


def test_tied_models_may_carry_a_head_and_old_ones_their_frequencies(tmp_path: Path) -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    source = random_tensors(config)
    extra = {
        "lm_head.weight": source["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    convert(write_checkpoint(tmp_path / "src", config, source | extra), tmp_path / "dst", "f32")
    _, stored = read_container(tmp_path / "dst")
    assert stored.keys() == source.keys() | {"rope_freqs"}


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("model.layers.0.self_attn.q_proj.bias", "bias"),
        ("model.layers.0.mlp.gate_proj.bias", "bias"),
        ("model.layers.2.input_layernorm.weight", "not part of this architecture"),
    ],
)
def test_tensors_without_a_place_are_refused_by_name(tmp_path: Path, extra: str, reason: str) -> None:
    tensors = random_tensors(LLAMA) | {extra: np.zeros(64, np.float32)}
    with pytest.raises(ConversionError, match=reason) as caught:
        convert(write_checkpoint(tmp_path / "src", LLAMA, tensors), tmp_path / "dst")
    assert caught.value.item == extra
    assert caught.value.path == tmp_path / "src" / "model.safetensors"
    assert not (tmp_path / "dst").exists()


def test_progress_counts_the_bytes_of_all_tensors(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert(write_checkpoint(tmp_path / "src", MIXTRAL), tmp_path / "dst", advance=lambda *a: seen.append(a))
    manifest, _ = read_container(tmp_path / "dst")
    total = sum(t.bytes for t in manifest.tensors)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
