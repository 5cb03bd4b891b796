"""What is found out about a model before anything depends on it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from colibri_daemon.common.facts import ModelFacts
from colibri_daemon.common.settings import Settings
from colibri_daemon.worker.check import check
from colibri_engine import Engine, selftest
from colibri_engine.container import Manifest
from colibri_engine.errors import ColibriError
from fixtures.models import Models


@pytest.fixture
def folder(models: Models, tmp_path: Path) -> Path:
    """A copy that may be changed; vocabulary 64, context 512, no end-of-text token."""
    copy = tmp_path / "model"
    shutil.copytree(models.random({"vocab": 64, "context": 512}), copy)
    for name in ("config.json", "generation_config.json"):
        (copy / name).unlink(missing_ok=True)
    return copy


def facts(folder: Path, **settings: Any) -> ModelFacts:
    return check(Settings(model=folder, **settings))


def test_facts_are_the_manifests_and_the_engines(folder: Path) -> None:
    manifest, found = Manifest.load(folder), facts(folder)
    assert (found.folder, found.name, found.id) == (str(folder.resolve()), manifest.name, manifest.model_id)
    assert (found.architecture, found.quantization) == (manifest.architecture, manifest.quantization)
    assert (found.vocab_size, found.context, found.eos_ids) == (64, 512, ())
    assert found.fingerprint == selftest.fingerprint()
    with Engine.open(folder) as engine:
        assert (found.slab_bytes, found.weight_bytes) == (engine.info.slab_bytes, engine.info.weight_bytes)
    assert ModelFacts.from_wire(json.loads(json.dumps(found.to_wire()))) == found


@pytest.mark.parametrize(
    ("settings", "pinned", "window", "max_len"),
    [
        ({}, 128, 384, 131072),
        ({"max_tokens_total": 1000}, 128, 384, 1000),
        ({"window": 0}, 0, 0, 512),
        ({"window": 0, "max_tokens_total": 100}, 0, 0, 100),
        ({"window": 100}, 128, 100, 131072),
        ({"window": 500}, 12, 500, 131072),
        ({"window": 600}, 0, 600, 131072),
        ({"pinned": 0}, 0, 384, 131072),
        ({"pinned": 200}, 200, 312, 131072),
        ({"pinned": 500, "window": 500, "positions": "absolute"}, 500, 500, 131072),
    ],
)
def test_attention_as_configured(folder: Path, settings: Any, pinned: int, window: int, max_len: int) -> None:
    found = facts(folder, **settings)
    assert (found.pinned, found.window, found.max_len) == (pinned, window, max_len)


def test_the_models_own_window_is_its_default(models: Models) -> None:
    found = facts(models.random({"vocab": 64, "window": 40}))
    assert (found.pinned, found.window) == (0, 40)


def test_attention_beyond_what_the_model_was_trained_for(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"pinned \(500\) and window \(500\).*512.*absolute"):
        facts(folder, pinned=500, window=500)


@pytest.mark.parametrize(("format", "wanted", "found"), [("f32", "auto", "f32"), ("q4", "auto", "f16"),
                                                         ("f32", "f16", "f16"), ("q4", "f32", "f32")])  # fmt: skip
def test_kv_is_stored_as_the_engine_would(models: Models, format: str, wanted: str, found: str) -> None:
    folder = models.random({"vocab": 64}, format)
    result = facts(folder, kv_format=wanted, slab_tokens=32)
    assert (result.kv_format, result.slab_tokens) == (found, 32)
    with Engine.open(folder, kv_format=None if wanted == "auto" else wanted, slab_tokens=32) as engine:
        assert result.slab_bytes == engine.info.slab_bytes


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": 3}, (2,)),
        ({"eos_token_id": [5, 7, 5]}, None, (5, 7)),
        ({"bos_token_id": 1}, {"eos_token_id": 3}, (3,)),
        ({"eos_token_id": None}, {"eos_token_id": [3, 4]}, (3, 4)),
        (None, {"eos_token_id": 63}, (63,)),
        ({"eos_token_id": []}, {"eos_token_id": 3}, ()),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_end_of_text_tokens(folder: Path, generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    assert facts(folder).eos_ids == expected


@pytest.mark.parametrize("value", [64, -1, "2", [1, "2"], True, [1.0], {"id": 2}, list(range(65))])
def test_end_of_text_tokens_that_are_none(folder: Path, value: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ColibriError, match=r"config\.json: eos_token_id: .*below 64"):
        facts(folder)


def test_models_that_are_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ColibriError, match="nowhere: is not a folder"):
        facts(tmp_path / "nowhere")
    with open(folder / "experts.bin", "ab") as file:
        file.write(b"x")
    with pytest.raises(ColibriError, match=r"experts\.bin: has \d+ bytes, the manifest says"):
        facts(folder)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(ColibriError, match=r"manifest\.json: format"):
        facts(folder)
