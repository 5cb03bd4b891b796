"""Sparse upcycling: a dense model's feed-forward network copied into E experts that differ by a little seeded noise.

With top-k weights that sum to one, equal experts would give the dense model's output (arXiv 2212.05055); the noise
makes routing matter. The recipe is fixed, so that everyone's upcycled model is the same one: PCG64 seeded with SEED;
per layer first the router, then expert by expert gate, up and down; all tensors rounded to float16; the head stored
even if the dense model's is tied.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ..errors import ConversionError
from ..geometry import TENSOR_NAMES, Slot, slots
from .companions import hugging_face_config
from .source import Companions, Source, matrix_shape
from .tensor import F32, ArrayTensor, Tensor, array_tensor

SEED = 20261130
NOISE = 0.05  # of a matrix's standard deviation
ROUTER_DEVIATION = 0.05
TOP_K = 2


class Upcycled(Source):
    """A dense source as a Mixtral. tensor() must be called once for every slot, in order: the noise is one stream."""

    def __init__(self, dense: Source, experts: int) -> None:
        if dense.geometry.experts > 1:
            raise ConversionError(dense.path, "is a mixture of experts already; --upcycle takes a dense model")
        if experts < TOP_K:
            raise ConversionError(dense.path, f"--upcycle needs at least {TOP_K} experts, {experts} was asked for")
        self.path, self.name, self.architecture = dense.path, f"{dense.name}-moe", "mixtral"
        self.geometry = replace(dense.geometry, experts=experts, top_k=TOP_K, tied_head=0)
        if problem := self.geometry.problem():
            raise ConversionError(dense.path, problem, "--upcycle")
        self.rope_freqs = dense.rope_freqs
        self._dense = dense
        self._rng = np.random.default_rng(SEED)
        self._layer: dict[str, tuple[F32, np.float32]] = {}  # role -> dense matrix and its deviation

    def check(self, wanted: Iterable[Slot]) -> None:
        self._dense.check(slots(self._dense.architecture, self._dense.geometry))

    def tensor(self, slot: Slot) -> Tensor:
        if slot.role == "rope_freqs":
            return self._dense.tensor(slot)
        if slot.role == "router":
            return self._rounded(slot, self._normal(slot.shape) * ROUTER_DEVIATION)
        if slot.expert >= 0:
            return self._noisy(slot)
        return Rounded(self.path, slot.name, *matrix_shape(slot), self._dense.tensor(self._dense_slot(slot)))

    def companions(self) -> Companions:
        found = self._dense.companions()
        old = json.loads(found.files.get("config.json", b"{}"))
        new = old | hugging_face_config("mixtral", self.geometry)
        found.files["config.json"] = json.dumps(new, indent=1).encode()
        return found

    def _noisy(self, slot: Slot) -> ArrayTensor:
        if slot.expert == 0:  # kept for the layer's other experts
            w = self._whole(slot)
            self._layer[slot.role] = w, w.std()
        w, deviation = self._layer[slot.role]
        noise = self._normal(slot.shape)
        noise *= NOISE * deviation
        noise += w
        return self._rounded(slot, noise)

    def _whole(self, slot: Slot) -> F32:
        tensor = self._dense.tensor(self._dense_slot(slot))
        return np.concatenate([tensor.read(r, min(r + 1024, tensor.rows)) for r in range(0, tensor.rows, 1024)])

    def _dense_slot(self, slot: Slot) -> Slot:
        role = "embed" if slot.role == "head" and self._dense.geometry.tied_head else slot.role
        expert = min(slot.expert, 0)
        name = TENSOR_NAMES[self._dense.architecture][role].format(layer=slot.layer, expert=expert)
        return replace(slot, role=role, expert=expert, name=name)

    def _normal(self, shape: tuple[int, ...]) -> F32:
        return self._rng.standard_normal(shape, dtype=np.float32)

    def _rounded(self, slot: Slot, values: F32) -> ArrayTensor:
        return array_tensor(self.path, slot.name, _through_f16(values))


@dataclass(frozen=True)
class Rounded(Tensor):
    """A dense tensor passed through float16."""

    inner: Tensor

    def read(self, start: int, stop: int) -> F32:
        return _through_f16(self.inner.read(start, stop))


def _through_f16(values: F32) -> F32:
    with np.errstate(over="ignore", invalid="ignore"):  # what does not fit becomes infinite and is refused when packed
        return values.astype(np.float16).astype(np.float32)
