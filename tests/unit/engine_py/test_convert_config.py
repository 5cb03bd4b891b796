"""config.json: what is understood, what is refused, and how refusals read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from colibri_engine.convert.fields import Fields
from colibri_engine.convert.hf_config import read_config
from colibri_engine.errors import ConversionError
from fixtures.checkpoints import LLAMA, MIXTRAL

PATH = Path("some/config.json")


def read(config: dict[str, Any]) -> Any:
    return read_config(Fields(PATH, config))


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in keys}


def test_mixtral() -> None:
    architecture, g, freqs = read(MIXTRAL)
    assert architecture == "mixtral"
    assert (g.experts, g.top_k, g.window, g.tied_head, g.head_dim) == (3, 2, 0, 0, 16)
    assert g.norm_eps_bits == 925353388
    assert freqs.dtype == np.float32
    assert freqs.shape == (8,)


def test_llama_is_one_expert() -> None:
    architecture, g, _ = read(LLAMA)
    assert (architecture, g.experts, g.top_k) == ("llama", 1, 1)


def test_head_dim_and_kv_heads_default_as_in_transformers() -> None:
    _, g, _ = read(without(LLAMA, "head_dim", "num_key_value_heads"))
    assert (g.head_dim, g.kv_heads) == (16, 4)
    _, g, _ = read(MIXTRAL | {"head_dim": None, "num_attention_heads": 8, "num_key_value_heads": None})
    assert (g.head_dim, g.kv_heads) == (8, 8)


def test_sliding_window() -> None:
    assert read(MIXTRAL | {"sliding_window": 24})[1].window == 24
    assert read(without(MIXTRAL, "sliding_window"))[1].window == 0


def test_rope_theta_in_its_old_and_new_place() -> None:
    old = read(MIXTRAL | {"rope_theta": 5e5})[2]
    new = read(without(MIXTRAL, "rope_theta") | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})[2]
    assert np.array_equal(old, new)
    assert old[1] == pytest.approx(5e5 ** (-1 / 8), rel=1e-6)


def test_rope_theta_defaults_by_architecture() -> None:
    assert read(without(MIXTRAL, "rope_theta"))[2][1] == pytest.approx(1e6 ** (-1 / 8), rel=1e-6)
    assert read(without(LLAMA, "rope_theta"))[2][1] == pytest.approx(1e4 ** (-1 / 8), rel=1e-6)


def test_linear_rope() -> None:
    plain = read(LLAMA)[2]
    for scaling in ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4}):
        assert np.array_equal(read(LLAMA | {"rope_scaling": scaling})[2], plain / np.float32(4))


def test_llama3_rope_keeps_short_waves_and_stretches_long_ones() -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    plain, scaled = read(LLAMA)[2].astype(float), read(LLAMA | {"rope_scaling": scaling})[2].astype(float)
    for before, after in zip(plain, scaled, strict=True):
        wave = 2 * math.pi / before
        smooth = (64 / wave - 1) / (4 - 1)
        between = ((1 - smooth) / 8 + smooth) * before
        expected = before if wave < 64 / 4 else before / 8 if wave > 64 / 1 else between
        assert after == pytest.approx(expected, rel=1e-6)
    assert {"kept", "stretched"} <= {"kept" if a == b else "stretched" for a, b in zip(plain, scaled, strict=True)}


def test_yarn_rope_with_a_neutral_attention_factor() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0, "original_max_position_embeddings": 64}
    plain, scaled = read(LLAMA)[2].astype(float), read(LLAMA | {"rope_scaling": scaling})[2].astype(float)

    def turn(rotations: float) -> float:
        return 16 * math.log(64 / (rotations * 2 * math.pi)) / (2 * math.log(10000))

    low, high = max(math.floor(turn(32)), 0), min(math.ceil(turn(1)), 15)
    for i, (before, after) in enumerate(zip(plain, scaled, strict=True)):
        ramp = min(max((i - low) / (high - low), 0), 1)
        assert after == pytest.approx(before / 4 * ramp + before * (1 - ramp), rel=1e-6)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 4, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "item"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.attention_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 2, "mscale_all_dim": 1}},
         "rope_scaling.attention_factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_parameters.rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
         "rope_scaling.high_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
         "rope_parameters.partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_attention_heads": 3}, "geometry"),
        ({"num_attention_heads": 3, "head_dim": None}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "geometry"),
        ({"head_dim": 15}, "geometry"),
        ({"num_hidden_layers": 10**18}, "geometry"),
        ({"vocab_size": 10**400}, "geometry"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": 1e29}, "geometry"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"model_type": ["llama"]}, "model_type"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(change: dict[str, Any], item: str) -> None:
    with pytest.raises(ConversionError) as caught:
        read(LLAMA | change)
    assert caught.value.item.split(" ")[0] == item
    assert str(caught.value).startswith(str(PATH))


@pytest.mark.parametrize(
    ("change", "item"),
    [
        ({"num_local_experts": None}, "num_local_experts"),
        ({"num_local_experts": 1}, "num_local_experts"),
        ({"num_experts_per_tok": 4}, "geometry"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": "big"}, "sliding_window"),
    ],
)
def test_mixture_refusals_name_the_field(change: dict[str, Any], item: str) -> None:
    with pytest.raises(ConversionError) as caught:
        read(MIXTRAL | change)
    assert caught.value.item == item


def test_unknown_architectures_list_the_known() -> None:
    with pytest.raises(ConversionError, match="'gpt_neox' is not supported; supported are mixtral, llama"):
        read(LLAMA | {"model_type": "gpt_neox"})
