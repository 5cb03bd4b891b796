"""GGUF files give the same container as the Hugging Face folder they were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from colibri_engine.convert import convert
from colibri_engine.convert.gguf_file import open_gguf
from colibri_engine.errors import ConversionError
from colibri_engine.verify import verify
from fixtures.checkpoints import (
    LLAMA,
    MIXTRAL,
    gguf_tensors,
    random_tensors,
    read_container,
    write_checkpoint,
    write_gguf,
)
from gguf import GGMLQuantizationType as Quant
from gguf.quants import dequantize, quantize

MODELS = {
    "llama": (LLAMA, True),
    "tied": (LLAMA | {"tie_word_embeddings": True}, True),
    "stacked experts": (MIXTRAL, True),
    "separate experts": (MIXTRAL, False),
}


def make(path: Path, config: dict[str, Any], stacked: bool = True, **how: Any) -> Path:
    return write_gguf(path, config, gguf_tensors(config, random_tensors(config), stacked), **how)


@pytest.mark.parametrize(("config", "stacked"), MODELS.values(), ids=MODELS)
def test_same_model_as_the_hugging_face_folder(tmp_path: Path, config: dict, stacked: bool) -> None:
    keys = {"llama.attention.key_length": 16, "llama.attention.value_length": 16, "llama.rope.dimension_count": 16}
    gguf = convert(make(tmp_path / "m.gguf", config, stacked, metadata=keys), tmp_path / "a", "f32")
    folder = convert(write_checkpoint(tmp_path / "src", config), tmp_path / "b", "f32")
    assert gguf.manifest.model_id == folder.manifest.model_id
    assert verify(tmp_path / "a") == []


@pytest.mark.parametrize(("quant", "fmt", "roles"), [
    (Quant.Q8_0, "q8", {"embed", "attn_q", "attn_k", "attn_o", "ffn_gate", "ffn_down"}),
    (Quant.Q4_0, "q4", {"ffn_gate", "ffn_up", "ffn_down"}),
    (Quant.Q8_0, "q4", {"embed", "head", "attn_q", "attn_k"}),
])  # fmt: skip
@pytest.mark.parametrize("config", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_quantised_blocks_are_taken_over_as_they_are(
    tmp_path: Path, config: dict, quant: Quant, fmt: str, roles: set[str]
) -> None:
    # Rows scaled apart, so that every block has its own scale.
    source = {n: w * np.linspace(0.1, 3, w.shape[0], dtype=np.float32).reshape(-1, *[1] * (w.ndim - 1))
              for n, w in random_tensors(config).items()}  # fmt: skip
    convert(write_gguf(tmp_path / "m.gguf", config, gguf_tensors(config, source), quant), tmp_path / "dst", fmt)
    manifest, stored = read_container(tmp_path / "dst")
    checked = set()
    for t in manifest.tensors:
        if t.role in roles:
            w = source[t.name]
            assert np.array_equal(stored[t.name], dequantize(quantize(w, quant), quant)), t.name
            checked.add(t.role)
    assert checked == roles


@pytest.mark.parametrize("quant", [Quant.F16, Quant.BF16, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1])
def test_other_types_are_dequantised(tmp_path: Path, quant: Quant) -> None:
    source = random_tensors(LLAMA)
    convert(make(tmp_path / "m.gguf", LLAMA, quant=quant), tmp_path / "dst", "f32")
    _, stored = read_container(tmp_path / "dst")
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"):
        expected = dequantize(quantize(source[name], quant), quant)
        assert np.array_equal(stored[name], expected), name


def test_rope_scaling(tmp_path: Path) -> None:
    def freqs(name: str, metadata: dict[str, Any], extra: dict[str, np.ndarray]) -> np.ndarray:
        tensors = gguf_tensors(LLAMA, random_tensors(LLAMA)) | extra
        convert(write_gguf(tmp_path / f"{name}.gguf", LLAMA, tensors, metadata=metadata), tmp_path / name, "f32")
        return read_container(tmp_path / name)[1]["rope_freqs"]

    plain = freqs("plain", {"llama.rope.scaling.type": "none"}, {})
    linear = freqs("linear", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {})
    factors = np.array([1, 1, 1, 1, 2, 4, 8, 8], np.float32)
    divided = freqs("divided", {}, {"rope_freqs.weight": factors})
    assert np.array_equal(linear, plain / np.float32(4))
    assert np.array_equal(divided, plain / factors)


@pytest.mark.parametrize(("metadata", "item"), [
    ({"general.architecture": "qwen2"}, "general.architecture"),
    ({"llama.attention.head_count": None}, "llama.attention.head_count"),
    ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count"),
    ({"llama.attention.head_count": 0}, "llama.attention.head_count"),
    ({"llama.attention.value_length": 32}, "llama.attention.value_length"),
    ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
    ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type"),
    ({"llama.rope.freq_base": 0.5}, "llama.rope.freq_base"),
    ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "llama.attention.layer_norm_rms_epsilon"),
    ({"llama.block_count": 3}, "blk.2.attn_norm.weight"),
    ({"llama.block_count": 1}, "blk.1.attn_k.weight"),
    ({"llama.block_count": 5000}, "metadata"),
    ({"llama.feed_forward_length": 97}, "blk.0.ffn_gate.weight"),
    ({"split.count": 2}, "split.count"),
])  # fmt: skip
def test_refusals_name_the_key_or_tensor(tmp_path: Path, metadata: dict[str, Any], item: str) -> None:
    path = make(tmp_path / "m.gguf", LLAMA, metadata=metadata)
    with pytest.raises(ConversionError) as caught:
        convert(path, tmp_path / "dst")
    assert (caught.value.path, caught.value.item) == (path, item)


def test_unknown_architectures_list_the_known(tmp_path: Path) -> None:
    path = make(tmp_path / "m.gguf", LLAMA, metadata={"general.architecture": "gemma"})
    with pytest.raises(ConversionError, match="'gemma' is not supported; supported are llama"):
        convert(path, tmp_path / "dst")


def test_a_bias_is_refused_by_name(tmp_path: Path) -> None:
    tensors = gguf_tensors(LLAMA, random_tensors(LLAMA)) | {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    with pytest.raises(ConversionError, match="bias") as caught:
        convert(write_gguf(tmp_path / "m.gguf", LLAMA, tensors), tmp_path / "dst")
    assert caught.value.item == "blk.0.attn_q.bias"


BYTES = [chr(c) for c in range(ord("a"), ord("z") + 1)] + ["Ġ", "1", "2"]
TOKENS = ["<|begin|>", "<|end|>", *BYTES, "ab", "Ġab", "12"]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3] + [1] * (len(TOKENS) - 2),
    "tokenizer.ggml.merges": ["a b", "Ġ ab", "1 2"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{{ messages }}",
}


def test_the_tokenizer_is_rebuilt(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    report = convert(make(tmp_path / "m.gguf", LLAMA, metadata=TOKENIZER), tmp_path / "dst")
    assert report.warnings == ()
    tokenizer = Tokenizer.from_file(str(tmp_path / "dst" / "tokenizer.json"))
    encoded = tokenizer.encode("<|begin|>ab ab12")
    assert encoded.tokens == ["<|begin|>", "ab", "Ġab", "1", "2"]  # digits stay apart
    assert tokenizer.decode(encoded.ids) == "ab ab12"
    config = json.loads((tmp_path / "dst" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ messages }}"
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<|begin|>", "<|end|>", False)
    assert json.loads((tmp_path / "dst" / "generation_config.json").read_text()) == {
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    assert json.loads((tmp_path / "dst" / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("change", [{"tokenizer.ggml.model": "llama"}, {"tokenizer.ggml.pre": "deepseek-coder"}])
def test_other_tokenizers_are_left_out_with_a_warning(tmp_path: Path, change: dict[str, str]) -> None:
    report = convert(make(tmp_path / "m.gguf", LLAMA, metadata=TOKENIZER | change), tmp_path / "dst")
    assert "tokenizer.json" in report.warnings[0]
    assert not (tmp_path / "dst" / "tokenizer.json").exists()


@pytest.mark.parametrize("change", [
    {"tokenizer.ggml.merges": ["a q", "nonsense"]},
    {"tokenizer.ggml.merges": ["x unknown"]},
    {"tokenizer.ggml.tokens": [1, 2]},
    {"tokenizer.ggml.merges": None},
])  # fmt: skip
def test_a_broken_tokenizer_is_an_error(tmp_path: Path, change: dict[str, Any]) -> None:
    path = make(tmp_path / "m.gguf", LLAMA, metadata=TOKENIZER | change)
    with pytest.raises(ConversionError) as caught:
        convert(path, tmp_path / "dst")
    assert caught.value.item.startswith("tokenizer.ggml.")
    assert not (tmp_path / "dst").exists()


def test_the_table_is_read_like_the_gguf_package_reads_it(tmp_path: Path) -> None:
    from gguf import GGUFReader

    path = make(tmp_path / "m.gguf", MIXTRAL, quant=Quant.Q8_0, metadata=TOKENIZER)
    fields, tensors = open_gguf(path)
    theirs = GGUFReader(path)
    assert fields == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert {t.name: (t.data_offset, t.n_bytes) for t in theirs.tensors} == {
        name: (t.offset, t.bytes) for name, t in tensors.items()
    }
