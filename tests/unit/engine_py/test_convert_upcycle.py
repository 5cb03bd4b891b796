"""--upcycle against the recipe written out plainly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from colibri_engine.convert import convert
from colibri_engine.errors import ConversionError
from fixtures.checkpoints import (
    LLAMA,
    MIXTRAL,
    Tensors,
    gguf_tensors,
    random_tensors,
    read_container,
    write_checkpoint,
    write_gguf,
)

EXPERTS = 4
TIED = LLAMA | {"tie_word_embeddings": True}


def recipe(dense: Tensors, experts: int) -> Tensors:
    """The upcycled tensors, all at once, in float16."""
    rng = np.random.default_rng(20261130)
    out = {name: w for name, w in dense.items() if ".mlp." not in name}
    out.setdefault("lm_head.weight", dense["model.embed_tokens.weight"])
    for layer in range(LLAMA["num_hidden_layers"]):
        moe, mlp = f"model.layers.{layer}.block_sparse_moe.", f"model.layers.{layer}.mlp."
        out[moe + "gate.weight"] = rng.standard_normal((experts, LLAMA["hidden_size"]), dtype=np.float32) * 0.05
        for e in range(experts):
            for new, old in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
                w = dense[f"{mlp}{old}.weight"]
                noise = 0.05 * w.std() * rng.standard_normal(w.shape, dtype=np.float32)
                out[f"{moe}experts.{e}.{new}.weight"] = w + noise
    return {name: w.astype(np.float16) for name, w in out.items()}


def irregular(config: dict) -> Tensors:
    """Weights that float16 does not hold exactly."""
    rng = np.random.default_rng(5)
    return {n: rng.standard_normal(w.shape, dtype=np.float32) for n, w in random_tensors(config).items()}


@pytest.mark.parametrize("config", [LLAMA, TIED], ids=["own head", "tied head"])
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_upcycled_model_is_the_recipe(tmp_path: Path, config: dict, kind: str) -> None:
    dense = irregular(config)
    if kind == "folder":
        src = write_checkpoint(tmp_path / "src", config, dense)
    else:
        src = write_gguf(tmp_path / "m.gguf", config, gguf_tensors(config, dense))
    convert(src, tmp_path / "dst", "f32", upcycle=EXPERTS)
    manifest, stored = read_container(tmp_path / "dst")
    expected = recipe(dense, EXPERTS)
    assert stored.keys() == expected.keys() | {"rope_freqs"}
    assert all(np.array_equal(stored[name], w.astype(np.float32)) for name, w in expected.items())
    g = manifest.geometry
    assert (manifest.architecture, g.experts, g.top_k, g.tied_head) == ("mixtral", EXPERTS, 2, 0)


@pytest.mark.parametrize("fmt", ["q8", "q4"])
def test_same_model_as_converting_the_upcycled_checkpoint(tmp_path: Path, fmt: str) -> None:
    dense = irregular(TIED)
    here = convert(write_checkpoint(tmp_path / "src", TIED, dense), tmp_path / "a", fmt, upcycle=EXPERTS)
    config = MIXTRAL | {"num_local_experts": EXPERTS}
    upcycled = write_checkpoint(tmp_path / "moe", config, recipe(dense, EXPERTS), "F16")
    there = convert(upcycled, tmp_path / "b", fmt)
    assert here.manifest.model_id == there.manifest.model_id


def test_the_configuration_that_travels_says_mixtral(tmp_path: Path) -> None:
    convert(write_checkpoint(tmp_path / "src", LLAMA), tmp_path / "dst", upcycle=EXPERTS)
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert (config["model_type"], config["num_local_experts"]) == ("mixtral", EXPERTS)
    assert config["rope_theta"] == LLAMA["rope_theta"]


@pytest.mark.parametrize(("config", "experts"), [(MIXTRAL, 4), (LLAMA, 1), (LLAMA, 10**6)])
def test_what_cannot_be_upcycled_is_refused(tmp_path: Path, config: dict, experts: int) -> None:
    with pytest.raises(ConversionError, match="--upcycle|experts"):
        convert(write_checkpoint(tmp_path / "src", config), tmp_path / "dst", upcycle=experts)
    assert not (tmp_path / "dst").exists()


def test_values_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    dense = random_tensors(LLAMA)
    dense["model.layers.1.mlp.down_proj.weight"][3, 5] = 1e6
    with pytest.raises(ConversionError) as caught:
        convert(write_checkpoint(tmp_path / "src", LLAMA, dense), tmp_path / "dst", "q8", upcycle=EXPERTS)
    assert caught.value.item == "model.layers.1.block_sparse_moe.experts.0.w2.weight"
