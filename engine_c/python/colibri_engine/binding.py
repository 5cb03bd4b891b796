"""Thin layer over the C interface: aligned buffers, errors, sampling parameters. Nothing here knows about models."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._colibri import ffi, lib
from .errors import EngineError

ISA_NAMES = {"ref": lib.COLIBRI_ISA_REF, "avx2": lib.COLIBRI_ISA_AVX2, "avx512": lib.COLIBRI_ISA_AVX512}
KV_FORMATS = {"f16": lib.COLIBRI_KV_F16, "f32": lib.COLIBRI_KV_F32}
POSITIONS = {"cache": lib.COLIBRI_POSITIONS_CACHE, "absolute": lib.COLIBRI_POSITIONS_ABSOLUTE}


def choice(table: Mapping[str, int], value: str, field: str) -> int:
    """The number behind a name; ValueError lists the names."""
    try:
        return table[value]
    except KeyError:
        raise ValueError(f"{field} is {value!r}; choose one of {', '.join(table)}") from None


def new(kind: str, **fields: Any) -> Any:
    """A zeroed C struct with struct_size set; ValueError for a number that does not fit its field."""
    struct = ffi.new(kind + " *")
    struct.struct_size = ffi.sizeof(kind)
    for name, value in fields.items():
        try:
            setattr(struct, name, value)
        except OverflowError:
            raise ValueError(f"{name} is {value}; it is negative or too large") from None
    return struct


def check(status: int, error: Any) -> None:
    """Raises EngineError for anything but COLIBRI_OK."""
    if status != lib.COLIBRI_OK:
        text = ffi.string(error.message).decode("utf-8", "replace")
        raise EngineError(status, text or ffi.string(lib.colibri_status_text(status)).decode())


class Buffer:
    """Page-aligned memory behind a colibri_buffer_t: anonymous, or a mapping of at least ``size`` bytes that the caller
    made. Lives until the last reference is gone."""

    def __init__(self, kind: int, size: int, memory: mmap.mmap | None = None) -> None:
        self.size = max(size, 64)
        if memory is not None and len(memory) < self.size:
            raise ValueError(f"a mapping of {len(memory)} bytes, {self.size} are needed")
        self._memory = mmap.mmap(-1, self.size) if memory is None else memory
        self.ptr = ffi.from_buffer(self._memory)
        self.c = new("colibri_buffer_t", type=kind, ptr=self.ptr, size=self.size, alignment=64, ref_count=1)

    def view(self, start: int, end: int) -> memoryview:
        """Bytes [start, end)."""
        return memoryview(self._memory)[start:end]

    def array(self, dtype: Any, *shape: int) -> np.ndarray:
        """A numpy view of the start of the buffer."""
        return np.frombuffer(self._memory, dtype=dtype, count=math.prod(shape)).reshape(shape)


def token_array(tokens: Iterable[int]) -> np.ndarray:
    """Token ids as contiguous uint32; ValueError for anything that is not a non-negative 32-bit integer."""
    array = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError("tokens must be a flat sequence of integers")
    if array.size and (int(array.min()) < 0 or int(array.max()) > 0xFFFFFFFF):
        raise ValueError("tokens must be in [0, 2^32)")
    return np.ascontiguousarray(array, dtype=np.uint32)


def unsigned(value: int, field: str) -> int:
    """value, if it fits 32 bits; ValueError naming the field otherwise."""
    if not 0 <= value <= 0xFFFFFFFF:
        raise ValueError(f"{field} is {value}; it must be in [0, 2^32)")
    return value


def pointer(array: np.ndarray | None, kind: str) -> Any:
    """C pointer to an array that the caller keeps alive; NULL for None."""
    return ffi.NULL if array is None else ffi.cast(kind + " *", array.ctypes.data)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters in the order the sampler applies them (colibri.h). Defaults: greedy.

    ``allowed`` is a collection of token ids; ``logprobs`` asks for that many best alternatives per token.
    """

    allowed: frozenset[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None

    def mask(self, vocab: int) -> np.ndarray | None:
        if self.allowed is None:
            return None
        bits = np.zeros((vocab + 31) // 32 * 32, dtype=np.uint8)
        ids = np.fromiter(self.allowed, dtype=np.int64, count=len(self.allowed))
        if ids.size and (ids.min() < 0 or ids.max() >= vocab):
            raise ValueError(f"allowed holds a token id outside the vocabulary of {vocab}")
        bits[ids] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def describe(self, vocab: int) -> tuple[Any, tuple[Any, ...]]:
        """A colibri_sampling_t without tokens and position, and the arrays it points to, to be kept alive with it."""
        mask, bias = self.mask(vocab), self.logit_bias or {}
        ids, values = token_array(bias.keys()), np.array(list(bias.values()), dtype=np.float32)
        c = new("colibri_sampling_t", top_k=self.top_k, temperature=self.temperature, top_p=self.top_p,
                min_p=self.min_p, repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty, seed=self.seed,
                bias_ids=pointer(ids, "uint32_t"), bias=pointer(values, "float"), n_bias=len(ids),
                allowed=pointer(mask, "uint32_t"), n_logprobs=self.logprobs or 0,
                want_logprob=self.logprobs is not None)
        return c, (mask, ids, values)


@dataclass(frozen=True)
class Sample:
    """One drawn token; ``logprob`` and ``top`` (id, log probability) only if asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def read_sample(sample: Any, wanted: bool) -> Sample:
    if not wanted:
        return Sample(int(sample.token))
    top = tuple((int(sample.top_ids[i]), float(sample.top_logprobs[i])) for i in range(sample.n_top))
    return Sample(int(sample.token), float(sample.logprob), top)
