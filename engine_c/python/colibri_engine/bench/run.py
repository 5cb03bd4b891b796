"""Timing prefill and decode. As in llama-bench, tokens are random and nothing is sampled."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from .._colibri import ffi
from ..container import Manifest
from ..engine import Engine
from ..sequence import KvArena, Sequence
from .ceiling import Model, Work
from .probe import Ceilings

CHUNK = 512  # most tokens of a prefill step
WARM = 32  # tokens of the untimed run that brings the caches back after a probe; some for every expert


@dataclass(frozen=True)
class Case:
    """prefill: n tokens of one stream after `depth` others; decode: n steps of `batch` streams from `depth` on."""

    test: str
    n: int
    depth: int
    batch: int


@dataclass(frozen=True)
class Result:
    """Of all streams together; each rate is the median of the repeats, and so is the share."""

    test: str
    n: int
    depth: int
    batch: int
    threads: int
    tokens_per_s: float
    share_of_ceiling: float
    ceiling_tokens_per_s: float
    machine: tuple[Ceilings, ...]  # by repeat


@dataclass(frozen=True)
class Repeat:
    """One timed run and what the machine could do at that time."""

    seconds: float
    work: Work
    machine: Ceilings

    @property
    def least(self) -> float:
        """Seconds at the ceiling."""
        return self.work.seconds(self.machine)


class Rewindable(Sequence):
    """A sequence that keeps its slabs, so that a stretch can be run again from where it began."""

    def advance(self, arena: KvArena, tokens: int) -> None:
        self.position += tokens


class Bench:
    """One open engine and what is needed to run tests on it."""

    def __init__(self, folder: Path, threads: int, tests: list[Case], isa: str | None, seed: int = 0) -> None:
        longest = max(t.depth + t.n for t in tests)
        streams = max(t.batch for t in tests)
        self._engine = Engine(folder, threads, isa=isa, max_tokens=max(CHUNK, streams), max_sequences=streams,
                              max_context=longest, expert_tokens=True, populate=True)
        info = self._engine.info
        self._threads, self._rng = threads, np.random.default_rng(seed)
        self._model = Model(Manifest.load(folder), info.slab_bytes / info.slab_tokens)
        self._arena = self._engine.arena(max(t.batch * -(-(t.depth + t.n) // info.slab_tokens) for t in tests))

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.close()

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self._engine.info.isa

    def run(self, test: Case, repeats: int, probe: Callable[[], Ceilings]) -> Result:
        """One warm-up, then the median of the repeats. On a machine shared with others rates change within minutes,
        so probe() is called before the first repeat and after each; a repeat's ceiling is the better of the two beside
        it: a moment that others took from a probe alone must not flatter the share."""
        streams = [self._stream(test.depth) for _ in range(test.batch)]
        once = self._prefill if test.test == "prefill" else self._decode
        once(test, streams)
        runs, before = [], probe()
        for _ in range(repeats):
            once(replace(test, n=min(test.n, WARM)), streams)
            seconds, work = once(test, streams)
            after = probe()
            runs.append(Repeat(seconds, work, before.better(after)))
            before = after
        for stream in streams:
            stream.close(self._arena)
        tokens = test.n * test.batch
        return Result(test.test, test.n, test.depth, test.batch, self._threads,
                      tokens_per_s=median(tokens / run.seconds for run in runs),
                      share_of_ceiling=median(run.least / run.seconds for run in runs),
                      ceiling_tokens_per_s=median(tokens / run.least for run in runs),
                      machine=tuple(run.machine for run in runs))

    def _tokens(self, *shape: int) -> np.ndarray:
        return self._rng.integers(0, self._engine.info.vocab, shape, dtype=np.uint32)

    def _stream(self, depth: int) -> Rewindable:
        stream = Rewindable(self._engine.attention(None, None, "cache"), self._engine.info.slab_tokens)
        for at in range(0, depth, CHUNK):
            size = min(CHUNK, depth - at)
            self._engine.step([(stream, self._tokens(size), size)], self._arena)
        return stream

    def _experts_read(self) -> int:
        """Experts that got a token since the last call."""
        counters = self._engine.expert_tokens
        used = int(np.count_nonzero(counters))
        counters.fill(0)
        return used

    def _prefill(self, test: Case, streams: list[Rewindable]) -> tuple[float, Work]:
        stream, tokens = streams[0], self._tokens(test.n)
        stream.position, starts = test.depth, range(0, test.n, CHUNK)
        self._experts_read()
        experts = keys = 0
        begin = time.perf_counter()
        for at in starts:
            part = tokens[at : at + CHUNK]
            last = at + CHUNK >= test.n
            self._engine.step([(stream, part, len(part) - last)], self._arena)
            experts += self._experts_read()
            keys += self._model.visible(stream.position)
        seconds = time.perf_counter() - begin
        return seconds, self._model.work(test.n, 1, len(starts), experts, keys)

    def _decode(self, test: Case, streams: list[Rewindable]) -> tuple[float, Work]:
        tokens = self._tokens(test.n, test.batch)
        batch = DecodeBatch(streams, self._arena, test.depth, test.n)
        self._experts_read()
        experts = 0
        begin = time.perf_counter()
        for i, row in enumerate(tokens):
            batch.set(test.depth + i, row)
            self._engine.forward(batch.entries, test.batch, self._arena)
            experts += self._experts_read()
        seconds = time.perf_counter() - begin
        keys = test.batch * sum(self._model.visible(test.depth + i + 1) for i in range(test.n))
        total = test.n * test.batch
        return seconds, self._model.work(total, total, test.n, experts, keys)


class DecodeBatch:
    """A token each of several streams, described to the engine once; between steps only tokens and positions change."""

    def __init__(self, streams: list[Rewindable], arena: KvArena, depth: int, steps: int) -> None:
        self.entries = ffi.new("colibri_sequence_t[]", len(streams))
        self._streams = streams  # own the slab tables the entries point to
        self._tokens = np.zeros(len(streams), np.uint32)
        for i, stream in enumerate(streams):
            stream.position = depth
            stream.reserve(arena, steps)
            stream.describe(self.entries[i], self._tokens[i : i + 1], 0)
        words = np.frombuffer(ffi.buffer(self.entries), np.uint32).reshape(len(streams), -1)
        self._positions = words[:, ffi.offsetof("colibri_sequence_t", "position") // 4]

    def set(self, position: int, tokens: np.ndarray) -> None:
        """What the next step computes: tokens [streams], all at one position."""
        self._positions[:] = position
        self._tokens[:] = tokens
