"""What is in a container, as data (--json) and as a table for people. Reads the manifest only."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .container import COMPANIONS, Manifest
from .geometry import default_attention, parameters

_LANES = 16  # the engine stores keys and values with head_dim rounded up to this
_F16 = 2  # bytes
# part of a model -> its roles
_PARTS = {
    "embedding": ("embed",),
    "head": ("head",),
    "attention": ("attn_q", "attn_k", "attn_v", "attn_o"),
    "experts": ("ffn_gate", "ffn_up", "ffn_down"),
    "router": ("router",),
    "norms": ("attn_norm", "ffn_norm", "final_norm", "rope_freqs"),
}


def describe(folder: Path) -> dict[str, Any]:
    """Everything `inspect` shows. Raises ContainerError if the folder is no container."""
    m = Manifest.load(folder)
    g = m.geometry
    total, active = parameters(m.architecture, g)
    pinned, window = default_attention(g)
    expert_bytes = sum(t.bytes for t in m.tensors if t.layer == 0 and t.expert == 0)
    return {
        "path": str(folder),
        "name": m.name,
        "architecture": m.architecture,
        "quantization": m.quantization,
        "model_id": m.model_id,
        "created_by": m.created_by,
        "geometry": asdict(g) | {"norm_eps": g.norm_eps},
        "parameters": {"total": total, "active": active},
        "bytes": {
            "total": sum(size for _, size in m.files),
            "expert": expert_bytes,
            "files": dict(m.files),
            "parts": {part: sum(t.bytes for t in m.tensors if t.role in roles) for part, roles in _PARTS.items()},
        },
        "dtypes": dict(Counter(t.dtype for t in m.tensors)),
        "attention_default": {"pinned": pinned, "window": window},
        "kv_bytes_per_token": 2 * g.layers * g.kv_heads * -(-g.head_dim // _LANES) * _LANES * _F16,
        "companions": [name for name in COMPANIONS if (folder / name).is_file()],
    }


def table(d: dict[str, Any]) -> str:
    """The description as aligned lines."""
    g, size = d["geometry"], d["bytes"]
    parts = ", ".join(f"{part} {_mb(n)}" for part, n in size["parts"].items() if n)
    attention = d["attention_default"]
    rows = {
        "model": f"{d['name']} ({d['architecture']}, {d['quantization']})",
        "model id": d["model_id"],
        "created by": d["created_by"],
        "layers": f"{g['layers']}, hidden {g['hidden']}, vocabulary {g['vocab']}",
        "attention": f"{g['heads']} heads of {g['head_dim']}, {g['kv_heads']} for keys and values",
        "feed-forward": _feed_forward(g),
        "head": "tied to the embedding" if g["tied_head"] else "its own",
        "norm epsilon": f"{g['norm_eps']:.6g}",
        "parameters": f"{_count(d['parameters']['total'])}, {_count(d['parameters']['active'])} active per token",
        "bytes": f"{_mb(size['total'])}: {parts}",
        "one expert": _mb(size["expert"]),
        "dtypes": ", ".join(f"{dtype} {n} tensors" for dtype, n in sorted(d["dtypes"].items())),
        "trained length": f"{g['context']} tokens" + (f", own sliding window {g['window']}" if g["window"] else ""),
        "served with": f"pinned {attention['pinned']}, window {attention['window']} by default",
        "KV cache": f"{d['kv_bytes_per_token']} bytes per token in f16",
        "beside it": ", ".join(d["companions"]) or "nothing",
    }
    width = max(map(len, rows))
    return "\n".join(f"{key:<{width}}  {value}" for key, value in rows.items())


def _feed_forward(g: dict[str, Any]) -> str:
    if g["experts"] == 1:
        return f"dense, inner size {g['inter']}"
    return f"{g['experts']} experts of inner size {g['inter']}, top-{g['top_k']} per token"


def _mb(n: int) -> str:
    return f"{n / 1e6:.1f} MB"


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"
