"""A GGUF file of architecture "llama" (dense, or Mixtral with its stacked or separate experts) as a Source."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ConversionError
from ..geometry import Geometry, Slot, eps_bits
from . import rope
from .companions import generation_config, hugging_face_config
from .fields import Fields
from .gguf_file import GgufTensor, open_gguf
from .gguf_tokenizer import tokenizer_files
from .source import Companions, Source, matrix_shape, refuse_unexpected, require_shape
from .tensor import F32, Quants, Tensor, array_tensor

_ARCHITECTURES = ("llama",)
_ROPE_FACTORS = "rope_freqs.weight"  # divisors of the inverse frequencies, how GGUF stores llama3 scaling
# role -> GGUF name, and for experts the stacked tensor [experts, rows, cols] first, then the separate ones
_NAMES = {
    "embed": ("token_embd.weight",),
    "head": ("output.weight",),
    "final_norm": ("output_norm.weight",),
    "attn_norm": ("blk.{layer}.attn_norm.weight",),
    "attn_q": ("blk.{layer}.attn_q.weight",),
    "attn_k": ("blk.{layer}.attn_k.weight",),
    "attn_v": ("blk.{layer}.attn_v.weight",),
    "attn_o": ("blk.{layer}.attn_output.weight",),
    "ffn_norm": ("blk.{layer}.ffn_norm.weight",),
    "router": ("blk.{layer}.ffn_gate_inp.weight",),
    "ffn_gate": ("blk.{layer}.ffn_gate_exps.weight", "blk.{layer}.ffn_gate.{expert}.weight"),
    "ffn_up": ("blk.{layer}.ffn_up_exps.weight", "blk.{layer}.ffn_up.{expert}.weight"),
    "ffn_down": ("blk.{layer}.ffn_down_exps.weight", "blk.{layer}.ffn_down.{expert}.weight"),
}
_DENSE_FFN = {
    "ffn_gate": ("blk.{layer}.ffn_gate.weight",),
    "ffn_up": ("blk.{layer}.ffn_up.weight",),
    "ffn_down": ("blk.{layer}.ffn_down.weight",),
}


class GgufSource(Source):
    """Raises ConversionError on construction for a file that is no usable model."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.stem
        values, self._tensors = open_gguf(path)
        self._meta = Fields(path, values)
        self._check_kind()
        self.geometry = self._read_geometry()
        if problem := self.geometry.problem():
            raise ConversionError(path, problem, "metadata")
        self.architecture = "mixtral" if self._meta.has("llama.expert_count") and self.geometry.experts > 1 else "llama"
        self.rope_freqs = self._read_rope()
        self._names = _NAMES if self.geometry.experts > 1 else _NAMES | _DENSE_FFN

    def check(self, wanted: Iterable[Slot]) -> None:
        used = {_ROPE_FACTORS}
        for slot in wanted:
            if slot.role != "rope_freqs":
                stored, stacked = self._find(slot)
                stored.check_type()
                lead = (self.geometry.experts,) if stacked else ()
                require_shape(self.path, stored.name, stored.shape, lead + slot.shape)
                used.add(stored.name)
        refuse_unexpected(dict.fromkeys(self._tensors, self.path), used, ())

    def tensor(self, slot: Slot) -> Tensor:
        if slot.role == "rope_freqs":
            return array_tensor(self.path, slot.name, self.rope_freqs)
        stored, stacked = self._find(slot)
        rows, cols = matrix_shape(slot)
        matrix = stored.window(slot.expert * rows if stacked else 0, rows, cols)
        if slot.role in ("attn_q", "attn_k"):
            return HalfRotated(self.path, stored.name, rows, cols, matrix, self.geometry.head_dim)
        return matrix

    def companions(self) -> Companions:
        config = hugging_face_config(self.architecture, self.geometry, self._theta())
        ids = {k: self._meta.values.get(f"tokenizer.ggml.{k}") for k in ("bos_token_id", "eos_token_id")}
        found = tokenizer_files(self._meta)
        found.files["config.json"] = json.dumps(config | ids, indent=1).encode()
        found.files["generation_config.json"] = generation_config(ids)
        return found

    def _check_kind(self) -> None:
        kind = self._meta.text("general.architecture")
        if kind not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise self._meta.fail("general.architecture", f"{kind!r} is not supported; supported are {known}")
        if self._meta.integer("split.count", 1, least=0) > 1:
            raise self._meta.fail("split.count", "split files are not supported; join them with gguf-split --merge")

    def _read_geometry(self) -> Geometry:
        m = self._meta
        hidden, heads = m.integer("llama.embedding_length"), m.integer("llama.attention.head_count")
        head_dim = m.integer("llama.attention.key_length", hidden // heads)
        if m.integer("llama.attention.value_length", head_dim) != head_dim:
            raise m.fail("llama.attention.value_length", f"differs from the key length {head_dim}")
        if m.integer("llama.rope.dimension_count", head_dim) != head_dim:
            raise m.fail("llama.rope.dimension_count", "rotating a part of the head only is not supported")
        experts = m.integer("llama.expert_count", 0, least=0)
        embed = self._tensors.get("token_embd.weight")
        return Geometry(
            vocab=embed.shape[0] if embed else m.integer("llama.vocab_size"),
            hidden=hidden,
            layers=m.integer("llama.block_count"),
            heads=heads,
            kv_heads=m.integer("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            inter=m.integer("llama.feed_forward_length"),
            experts=max(experts, 1),
            top_k=m.integer("llama.expert_used_count") if experts else 1,
            context=m.integer("llama.context_length"),
            window=m.integer("llama.attention.sliding_window", 0, least=0),
            norm_eps_bits=eps_bits(m.number("llama.attention.layer_norm_rms_epsilon")),
            tied_head=int("output.weight" not in self._tensors),
        )

    def _theta(self) -> float:
        return self._meta.number("llama.rope.freq_base", 10000.0)

    def _read_rope(self) -> F32:
        m, dim = self._meta, self.geometry.head_dim
        if self._theta() <= 1:
            raise m.fail("llama.rope.freq_base", f"is {self._theta()}, must be greater than 1")
        kind = m.text("llama.rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise m.fail("llama.rope.scaling.type", f"{kind!r} is not supported; supported are none, linear")
        factor = m.number("llama.rope.scaling.factor", 1) if kind == "linear" else 1.0
        freqs = rope.linear(self._theta(), dim, factor)
        stored = self._tensors.get(_ROPE_FACTORS)
        if stored is None:
            return freqs
        require_shape(self.path, stored.name, stored.shape, (dim // 2,))
        stored.check_type()
        with np.errstate(all="ignore"):
            freqs = freqs / stored.window(0, 1, dim // 2).read(0, 1)[0]
        if not (np.isfinite(freqs) & (freqs >= 0)).all():
            raise ConversionError(self.path, "holds factors that are not positive numbers", stored.name)
        return freqs

    def _find(self, slot: Slot) -> tuple[GgufTensor, bool]:
        """(tensor, whether it stacks all experts)."""
        names = [n.format(layer=slot.layer, expert=slot.expert) for n in self._names[slot.role]]
        for name in names:
            if name in self._tensors:
                return self._tensors[name], name.endswith("_exps.weight")
        raise ConversionError(self.path, "tensor is missing; the file is incomplete", names[-1])


@dataclass(frozen=True)
class HalfRotated(Tensor):
    """A query or key projection as the engine rotates it: the two halves of a head.

    GGUF keeps each rotated pair in neighbouring rows of a head (2i, 2i + 1); Hugging Face has them at i, dim/2 + i.
    """

    inner: Tensor
    head_dim: int

    def read(self, start: int, stop: int) -> F32:
        first, last, order = self._heads(start, stop)
        return self.inner.read(first, last)[order]

    def quants(self, dtype: str, start: int, stop: int) -> Quants | None:
        first, last, order = self._heads(start, stop)
        found = self.inner.quants(dtype, first, last)
        return found and (found[0][order], found[1][order])

    def _heads(self, start: int, stop: int) -> tuple[int, int, np.ndarray]:
        """The whole heads that cover the rows, and the rows' places among them."""
        d = self.head_dim
        first, last = start // d * d, -(-stop // d) * d
        head, row = np.divmod(np.arange(start, stop) - first, d)
        return first, last, head * d + row % (d // 2) * 2 + row // (d // 2)
