"""The shape of a model: its numbers, the roles its tensors play, and the order a container stores them in.

This is the Python half of engine_c/CONTAINER.md; converter, synthesiser and verifier all walk :func:`slots`, so what is
written is what is checked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass

# field -> (least, greatest), as the engine's loader has them. They keep a hostile configuration from asking for absurd
# work before its first tensor is looked at; every real model is far inside them.
_LARGEST_ROW = 1 << 20
LIMITS = {
    "vocab": (1, 1 << 24),
    "hidden": (1, _LARGEST_ROW),
    "layers": (1, 4096),
    "heads": (1, _LARGEST_ROW),
    "kv_heads": (1, _LARGEST_ROW),
    "head_dim": (2, 1024),
    "inter": (1, _LARGEST_ROW),
    "experts": (1, 65536),
    "top_k": (1, 64),
    "context": (1, (1 << 31) - 1),
    "window": (0, (1 << 31) - 1),
    "norm_eps_bits": (1, 0x3F800000),  # positive floats sort as their bits: up to 1
    "tied_head": (0, 1),
}


@dataclass(frozen=True)
class Geometry:
    """The manifest's "geometry". window 0 is full attention; norm_eps_bits the IEEE-754 bits of a float32."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    experts: int
    top_k: int
    context: int
    window: int
    norm_eps_bits: int
    tied_head: int

    def problem(self) -> str | None:
        """What is wrong with these numbers, naming the field; None if they are a possible model."""
        for field, value in asdict(self).items():
            low, high = LIMITS[field]
            if not low <= value <= high:
                return f"{field} is {value}, allowed is {low} to {high}"
        if self.head_dim % 2:
            return f"head_dim is {self.head_dim}, rotary positions need an even number"
        if self.heads * self.head_dim > _LARGEST_ROW:
            return f"heads * head_dim is {self.heads * self.head_dim}, allowed is up to {_LARGEST_ROW}"
        if self.heads % self.kv_heads:
            return f"heads ({self.heads}) is not a multiple of kv_heads ({self.kv_heads})"
        if self.top_k > self.experts:
            return f"top_k is {self.top_k}, but there are only {self.experts} experts"
        return None

    @property
    def norm_eps(self) -> float:
        return struct.unpack("<f", struct.pack("<I", self.norm_eps_bits))[0]

    def dims(self) -> dict[str, int]:
        """What the words in a role's shape stand for."""
        return {
            "vocab": self.vocab,
            "hidden": self.hidden,
            "q": self.heads * self.head_dim,
            "kv": self.kv_heads * self.head_dim,
            "inter": self.inter,
            "experts": self.experts,
            "half_head": self.head_dim // 2,
        }


def eps_bits(value: float) -> int:
    """Bit pattern of a value rounded to float32. Raises OverflowError if it has none."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


@dataclass(frozen=True)
class Role:
    """A kind of tensor. group picks its dtype: "expert" and "dense" by the format, "f32" always float32."""

    name: str
    place: str  # "model", "layer" or "expert"
    shape: tuple[str, ...]  # words of Geometry.dims; one word is a vector, layout "row"
    group: str


# In the order they are stored.
ROLES = (
    Role("embed", "model", ("vocab", "hidden"), "dense"),
    Role("head", "model", ("vocab", "hidden"), "dense"),
    Role("final_norm", "model", ("hidden",), "f32"),
    Role("rope_freqs", "model", ("half_head",), "f32"),
    Role("attn_norm", "layer", ("hidden",), "f32"),
    Role("attn_q", "layer", ("q", "hidden"), "dense"),
    Role("attn_k", "layer", ("kv", "hidden"), "dense"),
    Role("attn_v", "layer", ("kv", "hidden"), "dense"),
    Role("attn_o", "layer", ("hidden", "q"), "dense"),
    Role("ffn_norm", "layer", ("hidden",), "f32"),
    Role("router", "layer", ("experts", "hidden"), "f32"),
    Role("ffn_gate", "expert", ("inter", "hidden"), "expert"),
    Role("ffn_up", "expert", ("inter", "hidden"), "expert"),
    Role("ffn_down", "expert", ("hidden", "inter"), "expert"),
)

# format -> dtype of each group. q4 keeps attention, embedding and head in q8: on the upcycled SmolLM2 that is worth
# 1.9 of perplexity (26.33 -> 24.47) for a few per cent of the bytes.
POLICY = {
    "f32": {"expert": "f32", "dense": "f32", "f32": "f32"},
    "f16": {"expert": "f16", "dense": "f16", "f32": "f32"},
    "bf16": {"expert": "bf16", "dense": "bf16", "f32": "f32"},
    "q8": {"expert": "q8", "dense": "q8", "f32": "f32"},
    "q4": {"expert": "q4", "dense": "q8", "f32": "f32"},
}

_COMMON = {
    "embed": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "final_norm": "model.norm.weight",
    "rope_freqs": "rope_freqs",
    "attn_norm": "model.layers.{layer}.input_layernorm.weight",
    "attn_q": "model.layers.{layer}.self_attn.q_proj.weight",
    "attn_k": "model.layers.{layer}.self_attn.k_proj.weight",
    "attn_v": "model.layers.{layer}.self_attn.v_proj.weight",
    "attn_o": "model.layers.{layer}.self_attn.o_proj.weight",
    "ffn_norm": "model.layers.{layer}.post_attention_layernorm.weight",
}
# architecture -> role -> the name a tensor has in the manifest (Hugging Face's names).
TENSOR_NAMES = {
    "mixtral": _COMMON
    | {
        "router": "model.layers.{layer}.block_sparse_moe.gate.weight",
        "ffn_gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
        "ffn_up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
        "ffn_down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
    },
    "llama": _COMMON
    | {
        "ffn_gate": "model.layers.{layer}.mlp.gate_proj.weight",
        "ffn_up": "model.layers.{layer}.mlp.up_proj.weight",
        "ffn_down": "model.layers.{layer}.mlp.down_proj.weight",
    },
}


@dataclass(frozen=True)
class Slot:
    """One tensor a model must have. layer and expert are -1 where they do not apply."""

    role: str
    layer: int
    expert: int
    name: str
    shape: tuple[int, ...]
    group: str

    @property
    def layout(self) -> str:
        return "row" if len(self.shape) == 1 else "panel16"

    @property
    def file(self) -> int:
        """Index into the container's files: 0 dense.bin, 1 experts.bin."""
        return 1 if self.expert >= 0 else 0


def _wanted(role: Role, g: Geometry) -> bool:
    if role.name == "head":
        return not g.tied_head
    return role.name != "router" or g.experts > 1


def slots(architecture: str, g: Geometry) -> Iterator[Slot]:
    """Every tensor of a model, each file's in stored order: the model's, then per layer its own and its experts'."""
    names, dims = TENSOR_NAMES[architecture], g.dims()
    roles = [role for role in ROLES if _wanted(role, g)]

    def some(place: str, layer: int, expert: int) -> Iterator[Slot]:
        for role in roles:
            if role.place == place:
                name = names[role.name].format(layer=layer, expert=expert)
                shape = tuple(dims[word] for word in role.shape)
                yield Slot(role.name, layer, expert, name, shape, role.group)

    yield from some("model", -1, -1)
    for layer in range(g.layers):
        yield from some("layer", layer, -1)
        for expert in range(g.experts):
            yield from some("expert", layer, expert)


def parameters(architecture: str, g: Geometry) -> tuple[int, int]:
    """(all, active per token) weights; rope_freqs are constants and not counted."""
    total = active = 0
    for slot in slots(architecture, g):
        if slot.role == "rope_freqs" or slot.layer > 0:
            continue
        count = _product(slot.shape) * (g.layers if slot.layer == 0 else 1)
        total += count
        active += count if slot.expert < g.top_k else 0
    return total, active


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for n in shape:
        result *= n
    return result


def default_attention(g: Geometry) -> tuple[int, int]:
    """(pinned, window) a service uses by default: the model's own sliding window, else a pinned prefix of up to 512
    and a window of up to 2048 tokens within the trained length."""
    if g.window:
        return 0, g.window
    pinned = min(512, g.context // 4)
    return pinned, min(2048, g.context - pinned)
