"""What a step costs at least: bytes it must read, products it must compute.

Counted are the weights of active parameters (the embedding is a lookup) and the keys and values read; not counted are
attention's own products, norms and the like, so that a share of 1 is out of reach but means one thing everywhere. A
model that fits the caches can decode above the read rate of memory; on AVX2 the int8 rate is that of 4-bit weights, and
8-bit ones can reach about half of it (engine_c/host/probe.c).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..container import Manifest, TensorEntry
from .probe import Ceilings

_INT8 = ("q8", "q4")  # dtypes whose products are int8


@dataclass(frozen=True)
class Work:
    """Of one measured run."""

    bytes: float
    int8: float  # operations
    f32: float

    def seconds(self, c: Ceilings) -> float:
        """The least time it can take: the roofline."""
        return max(self.bytes / c.read, self.int8 / c.int8 + self.f32 / c.f32)


class Model:
    """Sizes of a model's parts, from its manifest."""

    def __init__(self, manifest: Manifest, kv_bytes_per_token: float) -> None:
        g = manifest.geometry
        self._kv, self._window, self._layers, self._top_k = kv_bytes_per_token, g.window, g.layers, g.top_k
        head = "embed" if g.tied_head else "head"
        dense = [t for t in manifest.tensors if t.expert < 0 and t.role not in ("embed", "head")]
        expert = [t for t in manifest.tensors if t.expert >= 0]
        self._head = _Part([t for t in manifest.tensors if t.role == head])
        self._dense = _Part(dense)
        self._expert = _Part(expert).over(g.layers * g.experts)  # one, on average

    def work(self, tokens: int, heads: int, steps: int, experts_read: float, kv_tokens: float) -> Work:
        """Of `steps` steps with `tokens` tokens in all, `heads` of which have logits.

        experts_read: experts read, summed over layers and steps; kv_tokens: keys seen, summed over what reads them
        once (a sequence's queries of one step share a read).
        """
        expert_uses = tokens * self._layers * self._top_k
        head_steps = min(heads, steps)
        read = steps * self._dense.bytes + head_steps * self._head.bytes + experts_read * self._expert.bytes
        int8, f32 = (tokens * d + heads * h + expert_uses * e for d, h, e in zip(
            self._dense.ops, self._head.ops, self._expert.ops, strict=True))
        return Work(read + kv_tokens * self._kv, int8, f32)

    def visible(self, length: int) -> int:
        """Keys the last token of a text this long sees."""
        return min(length, self._window or length)


class _Part:
    """Bytes of some tensors, and operations of one token through them as (int8, f32)."""

    def __init__(self, tensors: list[TensorEntry]) -> None:
        matrices = [t for t in tensors if t.layout == "panel16"]
        self.bytes = float(sum(t.bytes for t in tensors))
        self.ops = (_ops(t for t in matrices if t.dtype in _INT8), _ops(t for t in matrices if t.dtype not in _INT8))

    def over(self, n: int) -> _Part:
        """The average of n equal ones."""
        part = _Part([])
        part.bytes, part.ops = self.bytes / n, (self.ops[0] / n, self.ops[1] / n)
        return part


def _ops(matrices: Iterable[TensorEntry]) -> float:
    return float(sum(2 * math.prod(t.shape) for t in matrices))
