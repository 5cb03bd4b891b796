"""config.json of a Hugging Face folder -> architecture, geometry and inverse frequencies.

One row of ARCHITECTURES per model_type. Defaults are those of transformers' configuration classes, which old
checkpoints rely on.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..geometry import Geometry, eps_bits
from .fields import Fields
from .rope import inverse_frequencies
from .tensor import F32


@dataclass(frozen=True)
class Architecture:
    """A model_type: the name in the manifest, and transformers' defaults."""

    name: str
    moe: bool
    rope_theta: float
    norm_eps: float
    kv_heads: int | None  # None: as many as heads


ARCHITECTURES = {
    "mixtral": Architecture("mixtral", moe=True, rope_theta=1e6, norm_eps=1e-5, kv_heads=8),
    "llama": Architecture("llama", moe=False, rope_theta=1e4, norm_eps=1e-6, kv_heads=None),
}
# Switches that change the computation into one the engine does not do: field -> the only value allowed.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
}


def read_config(config: Fields) -> tuple[str, Geometry, F32]:
    """(architecture, geometry, rope frequencies). Raises ConversionError naming the field at fault."""
    kind = config.text("model_type")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise config.fail("model_type", f"{kind!r} is not supported; supported are {known}")
    arch = ARCHITECTURES[kind]
    for field, allowed in _FIXED.items():
        if config.has(field) and config.values[field] != allowed:
            raise config.fail(field, f"is {config.values[field]!r}; only {allowed!r} is supported")
    geometry = _geometry(config, arch)
    if problem := geometry.problem():
        raise config.fail("geometry", problem)
    freqs = inverse_frequencies(config, geometry.head_dim, geometry.context, arch.rope_theta)
    return arch.name, geometry, freqs


def _geometry(config: Fields, arch: Architecture) -> Geometry:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if not config.has("head_dim") and hidden % heads:
        raise config.fail("num_attention_heads", f"{hidden} / {heads} is no integer and there is no head_dim")
    return Geometry(
        vocab=config.integer("vocab_size"),
        hidden=hidden,
        layers=config.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", arch.kv_heads or heads),
        head_dim=config.integer("head_dim", hidden // heads),
        inter=config.integer("intermediate_size"),
        experts=config.integer("num_local_experts", least=2) if arch.moe else 1,
        top_k=config.integer("num_experts_per_tok") if arch.moe else 1,
        context=config.integer("max_position_embeddings"),
        window=config.integer("sliding_window", 0, least=0 if not config.has("sliding_window") else 1),
        norm_eps_bits=eps_bits(config.number("rms_norm_eps", arch.norm_eps)),
        tied_head=int(config.boolean("tie_word_embeddings", False)),
    )
