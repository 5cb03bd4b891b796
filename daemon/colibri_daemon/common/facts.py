"""What the daemon knows about its model without having it open: found by a short-lived child, told to everyone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ModelFacts:
    """Sizes in bytes; slab_bytes is one slab of slab_tokens tokens over all layers. pinned, window, positions and
    max_len are what the daemon will use, configuration applied. eos_ids as in generation_config.json, else
    config.json."""

    folder: str
    name: str
    id: str
    fingerprint: str
    architecture: str
    quantization: str
    vocab_size: int
    context: int  # trained length
    max_len: int
    eos_ids: tuple[int, ...]
    pinned: int
    window: int
    positions: str
    kv_format: str
    slab_tokens: int
    slab_bytes: int
    weight_bytes: int

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, body: dict[str, Any]) -> ModelFacts:
        return cls(**{**body, "eos_ids": tuple(body["eos_ids"])})
