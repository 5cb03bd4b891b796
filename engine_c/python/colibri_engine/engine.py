"""The engine from Python: open a model folder, compute logits, score and generate.

Every call releases the GIL while C works. An Engine serves one thread at a time; open several for several threads
(the weights are shared through the page cache).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from . import binding
from ._colibri import ffi, lib
from .binding import Buffer, Sample, Sampling, check, choice, new, pointer, token_array, unsigned
from .callbacks import Callbacks
from .errors import EngineError
from .runtime import MAX_CONTEXT, Options, Runtime
from .sequence import Attention, KvArena, Sequence


class Engine:
    """An open model. Use as a context manager or call close()."""

    def __init__(self, path: Path | str, threads: int = 1, *, isa: str | None = None, kv_format: str | None = None,
                 slab_tokens: int = 64, max_tokens: int = 256, max_sequences: int = 64,
                 max_context: int = MAX_CONTEXT, populate: bool = False,
                 callbacks: Callbacks | None = None, routing: str = "float", progress: bool | memoryview = False,
                 expert_tokens: bool | memoryview = False, files: Mapping[str, int] | None = None,
                 fault_exit: int | None = None) -> None:
        """``max_tokens`` is the chunk of one step; ``isa`` overrides COLIBRI_ISA; ``kv_format`` "f16" or "f32", by
        default f32 for f32, f16 and bf16 weights, f16 for q8 and q4; ``callbacks`` see callbacks.py; ``routing``
        "int8" uses the quantised routing table; ``progress`` and ``expert_tokens`` count, see the properties;
        ``progress`` may be 8 aligned bytes of writable memory, such as shared with a process that watches, and
        ``expert_tokens`` that of uint64 [layers, experts], to which is added; ``files``:
        open descriptors by name (manifest.json …), used instead of what the folder has under these names by now;
        ``fault_exit``: the exit code of this process when a mapped file turns out to have been cut short."""
        options = Options(threads=threads, isa=isa, kv_format=kv_format, slab_tokens=slab_tokens, max_tokens=max_tokens,
                          max_sequences=max_sequences, max_context=max_context, populate=populate, routing=routing,
                          progress=progress, expert_tokens=expert_tokens, files=files, fault_exit=fault_exit)
        self.runtime = Runtime(path, options, callbacks)
        self.path, self.info = self.runtime.path, self.runtime.info
        self._output = Buffer(lib.COLIBRI_OUTPUT, 4 * self.info.vocab)

    @classmethod
    def open(cls, path: Path | str, threads: int = 1, **options: Any) -> Engine:
        """Opens a model folder made by ``colibrid convert``."""
        return cls(path, threads, **options)

    # ---- life cycle ----

    def close(self) -> None:
        """Releases the model. Idempotent."""
        self.runtime.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def max_tokens(self) -> int:
        """Most tokens of one step."""
        return int(self.runtime.config.max_tokens)

    @property
    def max_context(self) -> int:
        """Most tokens of one sequence."""
        return int(self.runtime.config.max_context)

    @property
    def progress(self) -> int:
        """Grows while a step runs, if opened with progress; any thread may read it."""
        return self.runtime.monitor.progress

    @property
    def expert_tokens(self) -> np.ndarray | None:
        """uint64 [layers, experts]: tokens routed so far, if opened with expert_tokens=True. It may be zeroed."""
        return self.runtime.monitor.expert_tokens

    def cancel(self) -> None:
        """From any thread: the running step, or else the next one, ends with COLIBRI_CANCELLED. Once."""
        self.runtime.monitor.cancel()

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
        batch = self.runtime.batch(arena.buffer, self._output)
        batch.n_sequences, batch.sequences = len(entries), entries
        self.runtime.forward(batch)
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
        own, out = self.runtime, new("colibri_sample_t")
        check(lib.colibri_score(own.model, pointer(row, "float"), unsigned(token, "token"),
                                unsigned(logprobs, "logprobs"), out, own.err), own.err)
        return binding.read_sample(out, True)

    def sample(self, logits: np.ndarray, sampling: Sampling, position: int, prompt: np.ndarray | None = None,
               generated: np.ndarray | None = None) -> Sample:
        """Draws the token of ``position`` from raw logits [vocab]."""
        row = self._row(logits)
        prompt, generated = (None if ids is None else token_array(ids) for ids in (prompt, generated))
        c, _kept = sampling.describe(self.info.vocab)
        c.position = position
        c.prompt, c.n_prompt = pointer(prompt, "uint32_t"), 0 if prompt is None else len(prompt)
        c.generated, c.n_generated = pointer(generated, "uint32_t"), 0 if generated is None else len(generated)
        own, out = self.runtime, new("colibri_sample_t")
        check(lib.colibri_sample(own.model, c, pointer(row, "float"), own.scratch.c, out, own.err), own.err)
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

