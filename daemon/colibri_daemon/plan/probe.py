"""Steps of the first layers of the model, timed in processes that do it at the same time, as the workers will.

What is timed is what a worker runs (colibri_engine.batch), on real weights with their real routing, so predictions
follow the machine and the kernels; no constants are kept here. The slice is larger than the last cache, or decoding
would look faster than it is.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
from colibri_engine.batch import Batch, Lane
from colibri_engine.bench import probe as machine
from colibri_engine.bench.probe import Ceilings
from colibri_engine.binding import POSITIONS, Sampling
from colibri_engine.container import Manifest
from colibri_engine.engine import Engine
from colibri_engine.sequence import Attention, KvMemory
from colibri_engine.slice import first_layers, layers_of

from ..common.facts import ModelFacts

ROWS = (1, 8, 32, 64, 128, 256, 512)  # of one text; the longer ones only while they are shorter than _LONG
DEEP_ROWS = 64  # of the prefill step that looks back
_LEAST_SLICE = 128 << 20  # bytes
_LONG, _VISIT = 0.25, 0.05  # seconds
_MOST_STEPS = 50  # of a visit
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 100
_KV_BYTES = 512 << 20  # more streams than fit into this share slabs
_WAIT = 300.0  # seconds for the other processes to be ready
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Question:
    """streams: of one worker. depth: keys that the deepest steps see."""

    facts: ModelFacts
    threads: int
    workers: int
    streams: int
    depth: int
    seconds: float = 3.0  # for all rounds together


@dataclass(frozen=True)
class Timed:
    """A step of ``rows`` new tokens in each of ``streams`` texts after ``depth`` others. experts: of all layers, that
    got a token."""

    streams: int
    rows: int
    depth: int
    draws: bool
    seconds: float
    experts: float

    @property
    def shape(self) -> tuple[int, int, int, bool]:
        return self.streams, self.rows, self.depth, self.draws


@dataclass(frozen=True)
class Probed:
    """Of one worker among all. layers: of the slice, of all ``of``."""

    ceilings: Ceilings
    layers: int
    of: int
    steps: tuple[Timed, ...]

    def seconds(self, streams: int, rows: int, depth: int, draws: bool = False) -> float:
        """KeyError if that was not measured."""
        for step in self.steps:
            if step.shape == (streams, rows, depth, draws):
                return step.seconds
        raise KeyError((streams, rows, depth, draws))


def last_cache() -> int:
    """Bytes of the largest cache of a core; 0 if the system does not say."""
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    return max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=0)


def probe(question: Question) -> Probed:
    """Mean over the workers of what each found."""
    context = multiprocessing.get_context("spawn")  # threads of ours, if any, must not be forked
    barrier = context.Barrier(question.workers)
    with ProcessPoolExecutor(question.workers, context, _begin, (barrier,)) as processes:
        found = list(processes.map(_measure, [question] * question.workers))
    return _mean(found)


def _mean(found: list[Probed]) -> Probed:
    def mean(values: Iterator[float]) -> float:
        return statistics.fmean(values)

    first = found[0]
    ceilings = Ceilings(first.ceilings.threads, first.ceilings.isa,
                        *(mean(getattr(one.ceilings, name) for one in found) for name in ("read", "int8", "f32")))
    shared = set.intersection(*({step.shape for step in one.steps} for one in found))  # one may have found a step long
    steps = tuple(replace(step, seconds=mean(one.seconds(*step.shape) for one in found))
                  for step in first.steps if step.shape in shared)  # fmt: skip
    return Probed(ceilings, first.layers, first.of, steps)


_together: Barrier | None = None


def _begin(barrier: Barrier) -> None:
    """In each process, before its work."""
    global _together
    _together = barrier


def _measure(question: Question) -> Probed:
    facts, folder = question.facts, Path(question.facts.folder)
    manifest = Manifest.load(folder)
    layers = layers_of(manifest, max(_LEAST_SLICE, 2 * last_cache()))
    options = {"threads": question.threads, "kv_format": facts.kv_format, "slab_tokens": facts.slab_tokens,
               "max_tokens": max(*ROWS, question.streams), "max_sequences": question.streams, "expert_tokens": True,
               "max_context": question.depth + max(ROWS) + 1}  # fmt: skip
    with first_layers(folder, manifest, layers, **options) as engine:
        steps = _Steps(engine, question)
        if _together is not None:
            _together.wait(_WAIT)
        ceilings = machine.measure(engine.info.isa, question.threads)
        return Probed(ceilings, layers, manifest.geometry.layers, tuple(steps.all()))


def _middle(steps: list[Timed]) -> Timed:
    return replace(steps[0], seconds=statistics.median(step.seconds for step in steps),
                   experts=statistics.fmean(step.experts for step in steps))  # fmt: skip


class _Steps:
    """Texts whose past is there: what is in it does not matter for the time."""

    def __init__(self, engine: Engine, question: Question) -> None:
        facts = question.facts
        self._engine, self._question, self._rng = engine, question, np.random.default_rng(0)
        self._attention = Attention(facts.pinned, facts.window, POSITIONS[facts.positions])
        per_text = -(-(question.depth + max(ROWS)) // facts.slab_tokens)
        slabs = max(per_text, min(per_text * question.streams, _KV_BYTES // engine.info.slab_bytes))
        self._memory = KvMemory(engine.info, slabs)
        for slab in range(slabs):  # pages of their own: untouched memory is one page of zeros, in the nearest cache
            self._memory.slab(slab)[:] = bytes(engine.info.slab_bytes)
        self._batch = Batch(engine, self._memory, question.streams)

    def all(self) -> list[Timed]:
        """Each shape in turn, over and over, so that what disturbs disturbs all alike; the medians."""
        shapes = self._shapes()
        rounds = [[self._visit(*shape) for shape in shapes]]
        began, enough = time.perf_counter(), self._question.seconds
        while len(rounds) < _LEAST_ROUNDS or (time.perf_counter() - began < enough and len(rounds) < _MOST_ROUNDS):
            rounds.append([self._visit(*shape) for shape in shapes])
        return [_middle([step for visit in visits for step in visit]) for visits in zip(*rounds, strict=True)]

    def _shapes(self) -> list[tuple[int, int, int, bool]]:
        """Streams, rows, depth, draws. Each is run once, for its first touch of everything."""
        depth, found = self._question.depth, []
        for rows in ROWS:
            found.append((1, rows, 0, False))
            self.time(*found[-1])
            if self.time(*found[-1]).seconds > _LONG:
                break
        found.append((1, DEEP_ROWS, depth, False))
        for count in sorted({1, self._question.streams}):
            found += [(count, 1, 0, True), (count, 1, depth, False)]
            if count > 1:
                found.append((count, 1, 0, False))
        for shape in found:
            self.time(*shape)
        return found

    def _visit(self, *shape: Any) -> list[Timed]:
        """Steps of this shape, one after the other as when serving; of short ones several, the first not counted."""
        first = self.time(*shape)
        if first.seconds > _VISIT:
            return [first]
        steps = [self.time(*shape)]
        while sum(step.seconds for step in steps) < _VISIT and len(steps) < _MOST_STEPS:
            steps.append(self.time(*shape))
        return steps

    def time(self, streams: int, rows: int, depth: int, draws: bool) -> Timed:
        """One step."""
        work = [(self._lane(i, rows, depth, draws), rows) for i in range(streams)]
        begin = time.perf_counter()
        self._batch.run(work)
        seconds = time.perf_counter() - begin
        return Timed(streams, rows, depth, draws, seconds, self._experts())

    def _lane(self, index: int, rows: int, depth: int, draws: bool) -> Lane:
        info = self._engine.info
        tokens = self._rng.integers(0, info.vocab, depth + rows, dtype=np.uint32)
        lane = Lane(info, tokens, int(draws), self._attention, Sampling(), id=index)
        need = len(lane.slabs)
        lane.add_slabs([(index * need + i) % self._memory.slabs for i in range(need)])
        lane.position = depth
        return lane

    def _experts(self) -> int:
        """That got a token since the last call."""
        counted = self._engine.expert_tokens
        assert counted is not None
        used = int(np.count_nonzero(counted))
        counted.fill(0)
        return used
