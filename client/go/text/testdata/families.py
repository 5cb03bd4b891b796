"""Small tokenizers built like those of the models that Colibri serves, trained on the corpus."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
VOCABULARY = 800
TYPED = "<tool_call>"  # added, but not special: it can be typed


def _trained(tokenizer: Tokenizer, trainer: Any, texts: Sequence[str], specials: Sequence[str]) -> Tokenizer:
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(s, normalized=False) for s in specials])
    tokenizer.add_tokens([AddedToken(TYPED, normalized=False)])
    return tokenizer


def _byte_level(pre_tokenizer: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bytes_trainer() -> Any:
    return trainers.BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )


def _bytes() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def qwen(texts: Sequence[str]) -> Tokenizer:
    """NFC, a regex of its own, bytes."""
    tokenizer = _byte_level(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), "isolated"), _bytes()]))
    tokenizer.normalizer = normalizers.NFC()
    return _trained(tokenizer, _bytes_trainer(), texts, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])


def deepseek(texts: Sequence[str]) -> Tokenizer:
    """Several splits one after another; special tokens with characters beyond ASCII."""
    splits = [
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!-/:-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
    parts = [*(pre_tokenizers.Split(Regex(split), "isolated") for split in splits), _bytes()]
    specials = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
    return _trained(_byte_level(pre_tokenizers.Sequence(parts)), _bytes_trainer(), texts, specials)


def llama3(texts: Sequence[str]) -> Tokenizer:
    """A begin-of-text token by the post-processor; whole pieces of the vocabulary go before merges."""
    tokenizer = _byte_level(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA), "isolated"), _bytes()]))
    _trained(tokenizer, _bytes_trainer(), texts, ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    begin = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    template = processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    file = json.loads(tokenizer.to_str())
    file["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(file))


def mixtral(texts: Sequence[str]) -> Tokenizer:
    """SentencePiece's way: ▁ for spaces, bytes as tokens of their own for what has none."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False, special_tokens=specials, limit_alphabet=120, max_token_length=8
    )
    tokenizer.train_from_iterator(texts, trainer)
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = template
    file = json.loads(tokenizer.to_str())
    file["added_tokens"] = [token for token in file["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(file))


FAMILIES = {"qwen": qwen, "deepseek": deepseek, "llama3": llama3, "mixtral": mixtral}
