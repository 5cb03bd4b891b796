"""tokenizer.json and tokenizer_config.json from GGUF metadata, for byte-level BPE tokenizers.

One row of _PRE_TOKENIZERS per tokenizer.ggml.pre. A tokenizer of another kind is no error: the model is converted
without one and the user is told.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ..errors import ConversionError
from .fields import Fields
from .source import Companions

_CONTROL = 3  # tokenizer.ggml.token_type of special tokens
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> Any:
    from tokenizers import pre_tokenizers as p

    return p.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    """Digits one by one, then GPT-2's pattern."""
    from tokenizers import pre_tokenizers as p

    return p.Sequence([p.Digits(individual_digits=True), p.ByteLevel(add_prefix_space=False, use_regex=True)])


def _llama3() -> Any:
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as p

    return p.Sequence([p.Split(Regex(_LLAMA3), "isolated"), p.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _llama3,
    "llama3": _llama3,
}


def tokenizer_files(meta: Fields) -> Companions:
    """tokenizer.json and tokenizer_config.json, or a warning that the model takes token ids only."""
    model, pre = meta.values.get("tokenizer.ggml.model"), meta.values.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        what = f"tokenizer {model!r} with pre-tokenizer {pre!r}"
        known = ", ".join(_PRE_TOKENIZERS)
        reason = f"{meta.path}: no tokenizer.json for {what} (gpt2 with {known} is known)"
        return Companions(warnings=[f"{reason}; put the model's own into the folder to use text"])
    try:
        tokenizer = _build(meta, str(pre))
    except ImportError:
        raise ConversionError(
            meta.path, "needs the tokenizers package: pip install 'colibri-daemon[convert]'", "tokenizer"
        ) from None
    files = {
        "tokenizer.json": tokenizer.encode(),
        "tokenizer_config.json": json.dumps(_config(meta), indent=1).encode(),
    }
    return Companions(files)


def _build(meta: Fields, pre: str) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    tokens, kinds = meta.texts("tokenizer.ggml.tokens"), meta.integers("tokenizer.ggml.token_type")
    merges = [tuple(m.split(" ")) for m in meta.texts("tokenizer.ggml.merges")]
    try:
        bpe = models.BPE(
            vocab={t: i for i, t in enumerate(tokens)}, merges=merges, ignore_merges=pre.startswith("llama")
        )
    except Exception as e:  # the tokenizers package raises bare Exception
        raise meta.fail("tokenizer.ggml.merges", f"does not fit the tokens: {e}") from e
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer.to_str()


def _config(meta: Fields) -> dict[str, Any]:
    tokens = meta.texts("tokenizer.ggml.tokens")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key in ("bos", "eos", "pad", "unk"):
        number = meta.values.get(f"tokenizer.ggml.{_IDS[key]}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[f"{key}_token"] = tokens[number]
    for key in ("add_bos_token", "add_eos_token"):
        if isinstance(meta.values.get(f"tokenizer.ggml.{key}"), bool):
            config[key] = meta.values[f"tokenizer.ggml.{key}"]
    if isinstance(meta.values.get("tokenizer.chat_template"), str):
        config["chat_template"] = meta.values["tokenizer.chat_template"]
    return config


_IDS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
