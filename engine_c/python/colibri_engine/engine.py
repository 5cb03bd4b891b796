"""The engine from Python: open a model folder, compute logits, score and generate.

Every call releases the GIL while C works. An Engine serves one thread at a time; open several for several threads
(the weights are shared through the page cache).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from . import binding
from ._colibri import ffi, lib
from .binding import Buffer, Sample, Sampling, check, choice, new, pointer, token_array, unsigned
from .callbacks import Callbacks, Monitor
from .errors import EngineError
from .sequence import Attention, KvArena, Sequence

MAX_CONTEXT = 131072
UNQUANTISED = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Info:
    """Geometry and sizes of an open model (colibri_model_info_t)."""

    architecture: str
    isa: str
    numerics_class: str
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
    pinned: int
    window: int
    slab_tokens: int
    slab_bytes: int
    weight_bytes: int
    expert_bytes: int


_TEXTS = {"architecture": "architecture", "isa": "isa_name", "numerics_class": "numerics_class"}


def _read_info(model: Any) -> Info:
    raw = new("colibri_model_info_t")
    lib.colibri_describe(model, raw)
    texts = {name: ffi.string(getattr(raw, field)).decode() for name, field in _TEXTS.items()}
    numbers = {name: int(getattr(raw, name)) for name in Info.__dataclass_fields__ if name not in texts}
    return Info(**texts, **numbers)


class Engine:
    """An open model. Use as a context manager or call close()."""

    def __init__(self, path: Path | str, threads: int = 1, *, isa: str | None = None, kv_format: str | None = None,
                 slab_tokens: int = 64, max_tokens: int = 256, max_sequences: int = 64,
                 max_context: int = MAX_CONTEXT, populate: bool = False,
                 callbacks: Callbacks | None = None, routing: str = "float", progress: bool = False,
                 expert_tokens: bool = False) -> None:
        """``max_tokens`` is the chunk of one step; ``isa`` overrides COLIBRI_ISA; ``kv_format`` "f16" or "f32", by
        default f32 for f32, f16 and bf16 weights, f16 for q8 and q4; ``callbacks`` see callbacks.py; ``routing``
        "int8" uses the quantised routing table; ``progress`` and ``expert_tokens`` count, see the properties."""
        if threads < 1:
            raise ValueError(f"threads is {threads}; it must be at least 1")
        self.path = Path(path)
        self._pool, self._handle, self._host = ffi.NULL, ffi.NULL, None
        self._err = new("colibri_error_t")
        self._callbacks = callbacks or Callbacks()
        host = new_host_model()
        flags = lib.COLIBRI_MAP_HUGEPAGE | lib.COLIBRI_MAP_DONTDUMP | (lib.COLIBRI_MAP_POPULATE if populate else 0)
        check(lib.colibri_host_load(os.fsencode(path), flags, host, self._err), self._err)
        self._host = host
        try:
            self._config = self._configure(threads, isa, kv_format, slab_tokens, max_tokens, max_sequences, max_context)
            self._callbacks.install(self._config)
            self._monitor = Monitor(self._config, progress, self._expert_grid() if expert_tokens else None)
            self._init()
            self._routing = self._build_routing(choice({"float": 0, "int8": 1}, routing, "routing"))
        except EngineError as e:
            self.close()
            raise self._with_path(e) from None
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: Path | str, threads: int = 1, **options: Any) -> Engine:
        """Opens a model folder made by ``colibrid convert``."""
        return cls(path, threads, **options)

    def _manifest(self) -> dict[str, Any]:
        try:
            return json.loads(bytes(ffi.buffer(self._host.manifest, self._host.manifest_size)))
        except (ValueError, RecursionError):
            raise EngineError(lib.COLIBRI_MANIFEST, "is not well-formed JSON") from None

    def _with_path(self, e: EngineError) -> EngineError:
        """What the library found in a manifest, with the manifest's name."""
        if e.status not in (lib.COLIBRI_MANIFEST, lib.COLIBRI_TENSOR, lib.COLIBRI_UNSUPPORTED):
            return e
        return EngineError(e.status, f"{self.path}/manifest.json: {e}")

    def _own_kv_format(self) -> str:
        """Keys and values as precise as the weights: rounding them to f16 would be the largest error there is."""
        return "f32" if self._manifest().get("quantization") in UNQUANTISED else "f16"

    def _expert_grid(self) -> tuple[int, int]:
        check(lib.colibri_init_size(self._config, ffi.new("uint64_t *"), self._err), self._err)  # geometry is possible
        geometry = self._manifest()["geometry"]
        return geometry["layers"], geometry["experts"]

    def _configure(self, threads: int, isa: str | None, kv_format: str | None, slab_tokens: int, max_tokens: int,
                   max_sequences: int, max_context: int) -> Any:
        level = ffi.new("uint32_t *")
        if isa is None:
            check(lib.colibri_host_isa(level, self._err), self._err)
        else:
            level[0] = choice(binding.ISA_NAMES, isa, "isa")
        config = new("colibri_config_t", manifest=self._host.manifest, manifest_size=self._host.manifest_size,
                     weights=self._host.weights, n_weights=self._host.n_weights, isa=level[0], threads=threads,
                     max_tokens=max_tokens, max_sequences=max_sequences, max_context=max_context,
                     slab_tokens=slab_tokens,
                     kv_format=choice(binding.KV_FORMATS, kv_format or self._own_kv_format(), "kv_format"))
        if threads > 1:
            self._start_pool(config, threads)
        return config

    def _start_pool(self, config: Any, threads: int) -> None:
        pool = ffi.new("colibri_pool_t **")
        if code := lib.colibri_pool_create(threads, 0, pool):
            raise OSError(code, f"cannot start {threads} engine threads")
        self._pool = pool[0]
        config.parallel_for = ffi.addressof(lib, "colibri_pool_run")
        config.parallel_ctx = self._pool

    def _init(self) -> None:
        size = ffi.new("uint64_t *")
        check(lib.colibri_init_size(self._config, size, self._err), self._err)
        self._view = Buffer(lib.COLIBRI_WORKSPACE, size[0])
        self._config.view = self._view.c
        model = ffi.new("colibri_model_t **")
        check(lib.colibri_init(self._config, model, self._err), self._err)
        self._handle = model[0]
        self._callbacks.raise_failure()
        self.info = _read_info(self._model)
        lib.colibri_workspace_size(self._model, size)
        self._workspace = Buffer(lib.COLIBRI_WORKSPACE, size[0])
        lib.colibri_sample_size(self._model, size)
        self._scratch = Buffer(lib.COLIBRI_WORKSPACE, size[0])
        self._output = Buffer(lib.COLIBRI_OUTPUT, 4 * self.info.vocab)

    def _build_routing(self, wanted: int) -> Buffer | None:
        if not wanted:
            return None
        size = ffi.new("uint64_t *")
        if lib.colibri_routing_size(self._model, size) != lib.COLIBRI_OK:
            raise ValueError("routing is 'int8' but the model has no router")
        table = Buffer(lib.COLIBRI_ROUTING_TABLE, size[0])
        check(lib.colibri_routing_build(self._model, table.c, self._err), self._err)
        return table

    # ---- life cycle ----

    def close(self) -> None:
        """Releases the model. Idempotent."""
        lib.colibri_unload(self._handle)
        lib.colibri_pool_destroy(self._pool)
        self._handle, self._pool = ffi.NULL, ffi.NULL
        if self._host is not None:
            lib.colibri_host_unload(self._host, self._err)
            self._host = None

    @property
    def _model(self) -> Any:
        """The open handle."""
        if not self._handle:
            raise EngineError(lib.COLIBRI_INVALID_ARGUMENT, f"{self.path}: the engine is closed; open it again")
        return self._handle

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def max_tokens(self) -> int:
        """Most tokens of one step."""
        return int(self._config.max_tokens)

    @property
    def progress(self) -> int:
        """Grows while a step runs, if opened with progress=True; any thread may read it."""
        return self._monitor.progress

    @property
    def expert_tokens(self) -> np.ndarray | None:
        """uint64 [layers, experts]: tokens routed so far, if opened with expert_tokens=True. It may be zeroed."""
        return self._monitor.expert_tokens

    def cancel(self) -> None:
        """From any thread: the running step, or else the next one, ends with COLIBRI_CANCELLED. Once."""
        self._monitor.cancel()

    # ---- steps ----

    def attention(self, pinned: int | None, window: int | None, positions: str) -> Attention:
        """Mask parameters with None = the model's own."""
        own_p, own_w = self.info.pinned, self.info.window
        chosen = Attention(unsigned(own_p if pinned is None and window is None else pinned or 0, "pinned"),
                           unsigned(own_w if window is None else window, "window"),
                           choice(binding.POSITIONS, positions, "positions"))
        if chosen.pinned and not chosen.window:
            raise ValueError(f"pinned is {chosen.pinned} but window is 0 (full attention); give a window too")
        return chosen

    def arena(self, slabs: int) -> KvArena:
        """KV memory for sequences of this engine."""
        return KvArena(self.info, slabs)

    def step(self, work: list[tuple[Sequence, np.ndarray, int]], arena: KvArena) -> list[np.ndarray]:
        """One forward over (sequence, new tokens, first token whose logits are wanted) entries.

        Returns one view [rows, vocab] per entry, valid until the next step. The sequences advance.
        EngineError with COLIBRI_NON_FINITE if a sequence overflowed; a callback's own exception if one failed.
        """
        entries = ffi.new("colibri_sequence_t[]", len(work))
        for entry, (sequence, tokens, wanted) in zip(entries, work, strict=True):
            sequence.reserve(arena, len(tokens))
            sequence.describe(entry, tokens, wanted)
        rows = sum(len(tokens) - wanted for _, tokens, wanted in work)
        logits = self.forward(entries, rows, arena)
        return [self._advance(logits, arena, *item, entry) for item, entry in zip(work, entries, strict=True)]

    def forward(self, entries: Any, rows: int, arena: KvArena) -> np.ndarray:
        """One forward over filled colibri_sequence_t[], `rows` of whose tokens want logits: [rows, vocab], valid until
        the next one. For callers that keep their entries from step to step; sequences are theirs to advance."""
        self._need_output(rows)
        batch = new("colibri_batch_t", n_sequences=len(entries), sequences=entries, kv=arena.buffer.c,
                    workspace=self._workspace.c, output=self._output.c,
                    routing_table=self._routing.c if self._routing else ffi.NULL)
        status = lib.colibri_forward(self._model, batch, self._err)
        self._callbacks.raise_failure()
        if status == lib.COLIBRI_CANCELLED:
            self._monitor.clear()
        check(status, self._err)
        for index, entry in enumerate(entries):
            if entry.status != lib.COLIBRI_OK:
                raise EngineError(entry.status, f"sequence {index}: logits, keys or values are NaN or infinite")
        return self._output.array(np.float32, rows, self.info.vocab) if rows else np.empty((0, self.info.vocab))

    def _advance(self, logits: np.ndarray, arena: KvArena, sequence: Sequence, tokens: np.ndarray, wanted: int,
                 entry: Any) -> np.ndarray:
        sequence.advance(arena, len(tokens))
        return logits[entry.logits_row : entry.logits_row + len(tokens) - wanted]

    def _need_output(self, rows: int) -> None:
        if rows * self.info.vocab * 4 > self._output.size:
            self._output = Buffer(lib.COLIBRI_OUTPUT, rows * self.info.vocab * 4)

    def _step_tokens(self, chunk: int | None) -> int:
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk is {chunk}; it must be at least 1")
        return min(chunk or self.max_tokens, self.max_tokens)

    def _row(self, logits: np.ndarray) -> np.ndarray:
        """Raw logits as C reads them; anything but [vocab] is refused."""
        row = np.ascontiguousarray(logits, dtype=np.float32)
        if row.shape != (self.info.vocab,):
            raise ValueError(f"logits have shape {row.shape}; it must be ({self.info.vocab},)")
        return row

    def _chunks(self, tokens: np.ndarray, attention: Attention, first: int,
                chunk: int | None) -> Iterator[tuple[int, np.ndarray]]:
        """Runs a text through the model; yields (position, logits [rows, vocab]) for positions >= first."""
        if not len(tokens):
            raise ValueError("tokens is empty")
        step = self._step_tokens(chunk)
        sequence = Sequence(attention, self.info.slab_tokens)
        arena = self.arena(sequence.slabs_needed(len(tokens), step))
        for at in range(0, len(tokens), step):
            part = tokens[at : at + step]
            wanted = min(max(first - at, 0), len(part))
            yield at + wanted, self.step([(sequence, part, wanted)], arena)[0]

    # ---- whole texts ----

    def logits(self, tokens: Iterable[int], pinned: int | None = None, window: int | None = None,
               positions: str = "cache", *, chunk: int | None = None) -> np.ndarray:
        """Logits after every token: float32 [n_tokens, vocab]."""
        ids = token_array(tokens)
        out = np.empty((len(ids), self.info.vocab), dtype=np.float32)
        for at, rows in self._chunks(ids, self.attention(pinned, window, positions), 0, chunk):
            out[at : at + len(rows)] = rows
        return out

    def logprobs(self, tokens: Iterable[int], pinned: int | None = None, window: int | None = None,
                 positions: str = "cache", *, chunk: int | None = None) -> np.ndarray:
        """Log probability of token i + 1 given tokens up to i: float32 [n_tokens - 1]."""
        ids = token_array(tokens)
        out = np.empty(max(len(ids) - 1, 0), dtype=np.float32)
        for at, rows in self._chunks(ids, self.attention(pinned, window, positions), 0, chunk):
            for i, row in enumerate(rows[: len(ids) - 1 - at]):
                out[at + i] = self.score(row, int(ids[at + i + 1])).logprob
        return out

    def score(self, logits: np.ndarray, token: int, logprobs: int = 0) -> Sample:
        """Log probability of ``token`` and of the best alternatives under raw logits [vocab]."""
        row = self._row(logits)
        sample = new("colibri_sample_t")
        check(lib.colibri_score(self._model, pointer(row, "float"), unsigned(token, "token"),
                                unsigned(logprobs, "logprobs"), sample, self._err), self._err)
        return binding.read_sample(sample, True)

    def sample(self, logits: np.ndarray, sampling: Sampling, position: int, prompt: np.ndarray | None = None,
               generated: np.ndarray | None = None) -> Sample:
        """Draws the token of ``position`` from raw logits [vocab]."""
        row = self._row(logits)
        prompt, generated = (None if ids is None else token_array(ids) for ids in (prompt, generated))
        mask = sampling.mask(self.info.vocab)
        bias = sampling.logit_bias or {}
        ids, values = token_array(bias.keys()), np.array(list(bias.values()), dtype=np.float32)
        c = new("colibri_sampling_t", top_k=sampling.top_k, temperature=sampling.temperature, top_p=sampling.top_p,
                min_p=sampling.min_p, repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty, frequency_penalty=sampling.frequency_penalty,
                seed=sampling.seed, position=position, prompt=pointer(prompt, "uint32_t"),
                generated=pointer(generated, "uint32_t"), n_prompt=0 if prompt is None else len(prompt),
                n_generated=0 if generated is None else len(generated), bias_ids=pointer(ids, "uint32_t"),
                bias=pointer(values, "float"), n_bias=len(ids), allowed=pointer(mask, "uint32_t"),
                n_logprobs=sampling.logprobs or 0, want_logprob=sampling.logprobs is not None)
        out = new("colibri_sample_t")
        check(lib.colibri_sample(self._model, c, pointer(row, "float"), self._scratch.c, out, self._err), self._err)
        return binding.read_sample(out, sampling.logprobs is not None)

    def stream(self, tokens: Iterable[int], max_tokens: int, *, pinned: int | None = None, window: int | None = None,
               positions: str = "cache", stop_ids: Iterable[int] = (), chunk: int | None = None,
               **sampling: Any) -> Iterator[Sample]:
        """Generates token by token; ends after max_tokens or with the first of stop_ids (which is yielded)."""
        prompt, chosen, stops = token_array(tokens), Sampling(**sampling), frozenset(stop_ids)
        if not len(prompt):
            raise ValueError("tokens is empty")
        sequence = Sequence(self.attention(pinned, window, positions), self.info.slab_tokens)
        step = self._step_tokens(chunk)
        arena = self.arena(sequence.slabs_needed(len(prompt) + max_tokens, step))
        generated, fresh = np.empty(max_tokens, dtype=np.uint32), prompt
        for count in range(max_tokens):
            for at in range(0, len(fresh), step):
                part = fresh[at : at + step]
                last = at + step >= len(fresh)
                rows = self.step([(sequence, part, len(part) - 1 if last else len(part))], arena)[0]
            drawn = self.sample(rows[-1], chosen, len(prompt) + count, prompt, generated[:count])
            generated[count] = drawn.token
            fresh = generated[count : count + 1]
            yield drawn
            if drawn.token in stops:
                return

    def generate(self, tokens: Iterable[int], max_tokens: int, **sampling: Any) -> list[int]:
        """The continuation of a prompt as token ids; keywords as in stream()."""
        return [drawn.token for drawn in self.stream(tokens, max_tokens, **sampling)]


def new_host_model() -> Any:
    return ffi.new("colibri_host_model_t *")
