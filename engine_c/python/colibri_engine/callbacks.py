"""Python functions as the engine's callbacks, and the memory through which a running step is watched and stopped.

    class Newest(Callbacks):
        def kv_keep(self, id, layer, n):
            return np.arange(n) >= n - 512

    Engine(path, callbacks=Newest())

They run in the thread that called step, with the GIL, once per sequence or expert layer: for policies and experiments.
An exception ends the step and is raised from it. A Callbacks object serves one engine at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import numpy as np

from ._colibri import ffi, lib
from .binding import pointer

# overridden method -> fields of colibri_config_t to set; those two go together in C
_FIELDS = {
    "log": ("log",),
    "kv_evict": ("kv_evict",),
    "kv_keep": ("kv_keep",),
    "kv_mass": ("kv_mass",),
    "expert_fetch": ("expert_fetch", "expert_release"),
}


class Callbacks:
    """Override what is wanted; only that is installed. See the typedefs of the same names in colibri.h."""

    _handle: Any = None
    _failure: BaseException | None = None
    _lent: tuple[Any, ...] = ()  # buffers of the current layer's leases, kept alive until their release

    # ---- to be overridden ----

    def log(self, level: int, message: str) -> None:
        """level: 0 error, 1 warning, 2 info. Called while the model is opened."""

    def kv_evict(self, id: int, layer: int) -> tuple[int, int] | None:
        """(start, length) of the positions of sequence ``id`` that ``layer`` must not see any more; None: none."""

    def kv_keep(self, id: int, layer: int, n: int) -> np.ndarray | None:
        """What ``layer`` may see of positions [0, n), the step's own included: bool [n], or uint64 [ceil(n/64)] with
        bit i % 64 of word i / 64 for position i; None: everything. The step's own tokens are always seen."""

    def kv_mass(self, id: int, layer: int, mass: np.ndarray) -> None:
        """mass float32 [n]: softmax weight each position got, summed over heads and the step's queries."""

    def expert_fetch(self, layer: int, experts: np.ndarray) -> Iterable[tuple[Any, int]]:
        """experts uint32 [k], ascending: for each a (buffer, lease number). The buffer (bytes, memoryview, array) holds
        the expert's extent of experts.bin at a 64-byte aligned address until expert_release gets the lease back.
        experts.bin itself is not read when this is overridden."""
        raise NotImplementedError

    def expert_release(self, layer: int, leases: list[int]) -> None:
        """Once for every expert_fetch that returned, with its leases, whatever becomes of the step."""

    # ---- used by Engine ----

    def install(self, config: Any) -> None:
        """Enters the overridden methods into a colibri_config_t, before init."""
        self._handle = config.user = self._handle or ffi.new_handle(self)
        for method, fields in _FIELDS.items():
            if getattr(type(self), method) is not getattr(Callbacks, method):
                for field in fields:
                    setattr(config, field, getattr(lib, f"colibri_py_{field}"))
        if config.expert_fetch:
            config.weights[1].ptr, config.weights[1].size = ffi.NULL, 0

    def raise_failure(self) -> None:
        """Raises the first exception since the last call, if there was one."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def keep_failure(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def lend(self, loans: list[tuple[Any, int]], leases: Any) -> None:
        """Fills colibri_expert_lease_t entries [len(loans)]."""
        self._lent = tuple(ffi.from_buffer(buffer) for buffer, _ in loans)
        for i, (data, (_, lease)) in enumerate(zip(self._lent, loans, strict=True)):
            leases[i].data, leases[i].size, leases[i].lease = data, len(data), lease

    def end_loans(self) -> None:
        self._lent = ()


def keep_words(kept: np.ndarray, n: int) -> np.ndarray:
    """A kv_keep result as uint64 [ceil(n/64)]; ValueError if it is neither of the two forms."""
    kept, words = np.asarray(kept), -(-n // 64)
    if kept.dtype == np.uint64 and kept.shape == (words,):
        return kept
    if kept.dtype != np.bool_ or kept.shape != (n,):
        raise ValueError(f"kv_keep returned {kept.dtype} {list(kept.shape)}; it must be bool [{n}] or uint64 [{words}]")
    bits = np.zeros(words * 64, np.bool_)
    bits[:n] = kept
    return np.packbits(bits, bitorder="little").view("<u8")


def _on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Called by cffi with the exception of a function below, whose frame has the handle; the C side sees failure."""
    if trace is not None:
        ffi.from_handle(trace.tb_frame.f_locals["user"]).keep_failure(error)


def _extern(error: int | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        ffi.def_extern(f"colibri_py{function.__name__}", error, _on_error)(function)
        return function

    return register


@_extern(None)
def _log(user: Any, level: int, message: Any) -> None:
    ffi.from_handle(user).log(level, ffi.string(message).decode("utf-8", "replace"))


@_extern(1)
def _kv_evict(user: Any, id: int, layer: int, expert: int, start: Any, length: Any) -> int:
    evicted = ffi.from_handle(user).kv_evict(id, layer)
    if evicted is not None:
        start[0], length[0] = evicted
    return 0


@_extern(1)
def _kv_keep(user: Any, id: int, layer: int, n: int, keep: Any) -> int:
    kept = ffi.from_handle(user).kv_keep(id, layer, n)
    if kept is not None:
        words = keep_words(kept, n)
        np.frombuffer(ffi.buffer(keep, 8 * len(words)), np.uint64)[:] = words
    return 0


@_extern(None)
def _kv_mass(user: Any, id: int, layer: int, n: int, mass: Any) -> None:
    ffi.from_handle(user).kv_mass(id, layer, np.frombuffer(ffi.buffer(mass, 4 * n), np.float32).copy())


@_extern(1)
def _expert_fetch(user: Any, layer: int, leases: Any, n: int) -> int:
    owner = ffi.from_handle(user)
    loans = list(owner.expert_fetch(layer, np.array([leases[i].expert for i in range(n)], np.uint32)))
    if len(loans) != n:
        raise ValueError(f"expert_fetch returned {len(loans)} leases for {n} experts of layer {layer}")
    owner.lend(loans, leases)
    return 0


@_extern(None)
def _expert_release(user: Any, layer: int, leases: Any, n: int) -> None:
    owner = ffi.from_handle(user)
    owner.end_loans()
    owner.expert_release(layer, [leases[i].lease for i in range(n)])


def _words(memory: memoryview, count: int, name: str) -> Any:
    """uint64_t * of the caller's memory, which is not exported, only to be kept alive: CPython 3.11 crashes when it
    collects a cycle that has an exported memoryview in it."""
    address = int(ffi.cast("uintptr_t", ffi.from_buffer(f"uint64_t[{count}]", memory, require_writable=True)))
    if address % 8:
        raise ValueError(f"{name} is not aligned to 8 bytes")
    return ffi.cast("uint64_t *", address)


def _counter(progress: bool | memoryview) -> Any:
    """uint64_t * of the progress counter; NULL for none."""
    if isinstance(progress, bool):
        return ffi.new("uint64_t *") if progress else ffi.NULL
    return _words(progress, 1, "progress")


class Monitor:
    """Memory the engine shares with its caller while a step runs: cancel flag, progress and tokens per expert."""

    def __init__(self, config: Any, progress: bool | memoryview, expert_tokens: bool | memoryview,
                 grid: tuple[int, int] | None) -> None:
        """progress, expert_tokens: whether to count, or the memory to count in, 8 bytes for each counter. grid: layers
        and experts, if their tokens are to be counted."""
        self._cancel = config.cancel = ffi.new("uint32_t *")
        self._progress, self._memory = _counter(progress), (progress, expert_tokens)
        config.progress = self._progress
        self.expert_tokens: np.ndarray | None = None
        if grid is not None and isinstance(expert_tokens, memoryview):
            config.expert_tokens = _words(expert_tokens, grid[0] * grid[1], "expert_tokens")
        elif grid is not None:
            self.expert_tokens = np.zeros(grid, np.uint64)
            config.expert_tokens = pointer(self.expert_tokens, "uint64_t")

    @property
    def progress(self) -> int:
        if not self._progress:
            raise ValueError("progress is not counted; open the engine with progress=True")
        return int(self._progress[0])

    def cancel(self) -> None:
        self._cancel[0] = 1

    def clear(self) -> None:
        """Takes a cancel back."""
        self._cancel[0] = 0
