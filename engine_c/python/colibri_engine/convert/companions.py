"""The small JSON files that are made rather than copied when a source has none."""

from __future__ import annotations

import json
from typing import Any

from ..geometry import Geometry

_CLASSES = {"mixtral": "MixtralForCausalLM", "llama": "LlamaForCausalLM"}


def hugging_face_config(architecture: str, g: Geometry, rope_theta: float | None = None) -> dict[str, Any]:
    """config.json of a model with this geometry, for tools that expect one. The engine reads the manifest only."""
    config: dict[str, Any] = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": g.vocab,
        "hidden_size": g.hidden,
        "intermediate_size": g.inter,
        "num_hidden_layers": g.layers,
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "max_position_embeddings": g.context,
        "rms_norm_eps": g.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": bool(g.tied_head),
    }
    if rope_theta is not None:
        config["rope_theta"] = rope_theta
    if architecture == "mixtral":
        config |= {"num_local_experts": g.experts, "num_experts_per_tok": g.top_k, "sliding_window": g.window or None}
    return config


def generation_config(ids: dict[str, Any]) -> bytes:
    """generation_config.json with the token ids that begin and end a text."""
    return json.dumps({k: v for k, v in ids.items() if v is not None}, indent=1).encode()
