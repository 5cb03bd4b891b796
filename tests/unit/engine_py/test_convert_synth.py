"""synth-model: any geometry, the same bytes for the same seed, experts that differ, values that stay sane."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from colibri_engine.convert.synth import synthesise
from colibri_engine.errors import ConversionError
from colibri_engine.geometry import POLICY, Geometry, parameters
from colibri_engine.verify import verify
from fixtures.checkpoints import read_container

SMALL = Geometry(
    vocab=100, hidden=96, layers=2, heads=6, kv_heads=2, head_dim=16, inter=160, experts=4, top_k=2, context=256,
    window=0, norm_eps_bits=925353388, tied_head=0,
)  # fmt: skip


@pytest.mark.parametrize("fmt", POLICY)
def test_every_format_is_sound(tmp_path: Path, fmt: str) -> None:
    report = synthesise(tmp_path / "m", SMALL, fmt)
    assert verify(tmp_path / "m") == []
    assert report.manifest.quantization == fmt
    assert report.bytes == sum((tmp_path / "m" / name).stat().st_size for name in ("dense.bin", "experts.bin"))


def test_the_seed_decides(tmp_path: Path) -> None:
    ids = [synthesise(tmp_path / f"m{i}", SMALL, seed=seed).manifest.model_id for i, seed in enumerate((1, 1, 2))]
    assert ids[0] == ids[1] != ids[2]


def test_weights_are_sane_and_experts_differ(tmp_path: Path) -> None:
    synthesise(tmp_path / "m", SMALL, "f32")
    manifest, stored = read_container(tmp_path / "m")
    experts = {t.sha256 for t in manifest.tensors if t.expert >= 0}
    assert len(experts) == 2 * 4 * 3
    gate = stored["model.layers.0.block_sparse_moe.experts.0.w1.weight"]
    assert gate.std() * np.sqrt(96) == pytest.approx(1, rel=0.1)
    down = stored["model.layers.0.block_sparse_moe.experts.0.w2.weight"]
    assert down.std() * np.sqrt(160 * 4) == pytest.approx(1, rel=0.1)
    assert len(np.unique(stored["lm_head.weight"], axis=0)) == 100
    assert (stored["model.norm.weight"] == 1).all()


def test_one_expert_is_a_dense_llama(tmp_path: Path) -> None:
    dense = replace(SMALL, experts=1, top_k=1)
    manifest = synthesise(tmp_path / "m", dense).manifest
    assert manifest.architecture == "llama"
    assert not any(t.role == "router" for t in manifest.tensors)


@pytest.mark.parametrize("change", [{"head_dim": 3}, {"kv_heads": 4}, {"top_k": 5}, {"hidden": 0}, {"layers": 1 << 40}])
def test_impossible_geometries_are_refused(tmp_path: Path, change: dict[str, int]) -> None:
    with pytest.raises(ConversionError):
        synthesise(tmp_path / "m", replace(SMALL, **change))
    assert not (tmp_path / "m").exists()


def test_parameters_of_mixtral_8x7b() -> None:
    """46.7 B in all and 12.9 B active are the published figures (arXiv 2401.04088: 47 B and 13 B)."""
    g = replace(
        SMALL, vocab=32000, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, inter=14336, experts=8, top_k=2
    )
    assert parameters("mixtral", g) == (46702792704, 12879925248)
