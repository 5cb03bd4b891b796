"""How long a prefill chunk may be, measured: short enough that a step keeps the stall bound."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from colibri_engine import Engine
from colibri_engine.batch import Batch, Lane
from colibri_engine.binding import POSITIONS, Sampling
from colibri_engine.sequence import Attention, KvMemory

from ..common.facts import ModelFacts
from .scheduler import LEAST_CHUNK

STALL = 0.1  # seconds a running stream may wait for another's prefill, unless one pass over the weights is longer
LEAST, MOST = LEAST_CHUNK, 512  # rows of a chunk
GENTLE_LEAST = 32  # least rows of a chunk beside running streams, if the bound allows: below them kernels lose too much
GENTLE_SECONDS = 0.005  # and what it may take at least: nobody sees that, and a small model's steps cost more than rows
_FEW, _MANY = 8, 128  # rows of the measured steps, the longer ...
_MANY_SECONDS = 0.1  # ... at most about as long as this
_KEY = 1  # of the sequence that is measured


@dataclass(frozen=True)
class Timing:
    """A step of ``rows`` of one text that look back at ``keys`` tokens each took ``seconds``."""

    rows: int
    keys: int
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """chunk: most prefill rows of a step. gentle: of one in which streams go on; longer ones would hardly make more
    tokens per second, and every stream would wait. key_cost: of each key a row looks at, in rows. stall:
    seconds that a step takes at most."""

    chunk: int
    gentle: int
    key_cost: float
    stall: float


def calibrate(engine: Engine, facts: ModelFacts, step_tokens: int) -> Calibration:
    """Times three steps, in memory of its own: short, long, and as far into a text as it takes for a query to see the
    most. step_tokens: a chunk that was configured, or 0."""
    probe = _Probe(engine, facts, min(_MANY, step_tokens or _MANY))
    few = min(_FEW, probe.most)
    probe.time(few, 0)  # first touch of everything
    # Disturbed, this one would make the chunk too long; the others make it too short.
    short = min((probe.time(few, 0) for _ in range(2)), key=lambda timing: timing.seconds)
    long = probe.time(min(_MANY, probe.most, max(4 * few, int(few * _MANY_SECONDS / short.seconds))), 0)
    deep = probe.time(few, probe.depth)
    return choose(short, long, deep, step_tokens)


def choose(short: Timing, long: Timing, deep: Timing, step_tokens: int) -> Calibration:
    """A step costs one pass over the weights, so much per row, and so much per row and key. With large models the pass
    alone is longer than STALL; then a chunk may take as long as the pass."""
    even = short.seconds / short.rows
    slope = (long.seconds - short.seconds) / (long.rows - short.rows) if long.rows > short.rows else even
    per_row = max(slope, even / 100)  # a disturbed measurement must not promise the impossible
    one_pass = max(short.seconds - short.rows * per_row, 0.0)
    per_key = max(deep.seconds - short.seconds, 0.0) / deep.rows / max(deep.keys, 1)
    if step_tokens:
        takes = one_pass + step_tokens * (per_row + deep.keys * per_key)
        return Calibration(step_tokens, step_tokens, 0.0, max(STALL, takes))
    chunk = min(MOST, max(LEAST, int((max(STALL, 2 * one_pass) - one_pass) / per_row)))
    least = LEAST * (per_row + deep.keys * per_key)  # a step always has room for these
    # As long as the pass that the streams need anyway.
    gentle = min(chunk, max(GENTLE_LEAST, int(max(one_pass, GENTLE_SECONDS) / per_row)))
    return Calibration(chunk, gentle, per_key / per_row, max(STALL, one_pass + max(chunk * per_row, least)))


class _Probe:
    """A text whose past is all there, in one slab over and over: what is in it does not matter for the time."""

    def __init__(self, engine: Engine, facts: ModelFacts, most: int) -> None:
        self._info, slab_tokens = engine.info, facts.slab_tokens
        self._attention = Attention(facts.pinned, facts.window, POSITIONS[facts.positions])
        self._own = list(range(-(-most // slab_tokens)))  # slabs of the rows themselves; one more is the past
        self._batch = Batch(engine, KvMemory(engine.info, len(self._own) + 1), 1)
        self.most = min(most, facts.max_len - 1)  # rows of a step
        seen = min(facts.max_len - 1, facts.pinned + facts.window if facts.window else facts.max_len)
        self.depth = max(0, seen - self.most) // slab_tokens * slab_tokens

    def time(self, rows: int, depth: int) -> Timing:
        """A step of so many rows, at most ``most``, after ``depth`` tokens, whole slabs."""
        tokens = np.random.default_rng(rows).integers(0, self._info.vocab, depth + rows, dtype=np.uint32)
        lane = Lane(self._info, tokens, 1, self._attention, Sampling(), id=_KEY)
        lane.add_slabs(([len(self._own)] * (depth // self._info.slab_tokens) + self._own)[: len(lane.slabs)])
        lane.position = depth
        begin = time.perf_counter()
        self._batch.run([(lane, rows)])
        return Timing(rows, depth, time.perf_counter() - begin)
