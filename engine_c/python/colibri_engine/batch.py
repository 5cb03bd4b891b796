"""Steps over many sequences at once, for serving: everything C reads stays in place from step to step.

    batch = Batch(engine, arena, max_sequences)
    lane = Lane(engine.info, prompt, max_tokens, attention, sampling)
    lane.add_slabs(arena.take(n))
    for outcome in batch.run([(lane, rows), ...]): ...

A step of decode rows costs a few microseconds of Python a lane. A lane that fails (NaN, nothing left to draw) says so
in its outcome; the others of the step are as valid as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._colibri import ffi, lib
from .binding import Buffer, Sampling, check, new
from .engine import Engine
from .runtime import Info
from .sequence import Attention, KvMemory

SCORED_ROWS = 32  # most rows of one step that are scored: bounds the logits in memory
_ENTRY = ffi.sizeof("colibri_sequence_t")
_TOKEN = 4  # bytes


@dataclass(frozen=True, slots=True)
class Scoring:
    """Log probabilities wanted of the prompt's tokens [first, last), each under those before it, and of the ``top``
    best alternatives. 1 <= first <= last."""

    first: int
    last: int
    top: int = 0


@dataclass(slots=True)
class Drawn:
    """A token, already at the end of its lane. logprob and the best alternatives if the sampling asks for them."""

    token: int
    logprob: float = 0.0
    top_ids: bytes = b""  # u32 [n]
    top_logprobs: bytes = b""  # f32 [n]


@dataclass(slots=True)
class Scored:
    """Of n consecutive tokens from index ``first`` on: f32 [n], and u32 and f32 [n, top]."""

    first: int
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes


@dataclass(slots=True)
class Failed:
    """Why the lane can go no further (colibri_status_t). What it computed in this step is void."""

    status: int
    message: str


def _failed(status: int, error: Any) -> Failed:
    return Failed(status, ffi.string(error.message).decode("utf-8", "replace"))


def _top(sample: Any) -> tuple[bytes, bytes]:
    """The best alternatives of a colibri_sample_t, as in Drawn."""
    size = sample.n_top * _TOKEN
    return ffi.buffer(sample.top_ids, size)[:], ffi.buffer(sample.top_logprobs, size)[:]


Outcome = Drawn | Scored | Failed | None  # None: more of the lane is to be computed first


class Lane:
    """One sequence as C reads it: text, slab table, sampling parameters.

    tokens[:length] are known, tokens[:position] computed and in the KV cache; target is how many are to be computed
    before the lane waits for something else. With ``max_tokens`` 0 nothing is drawn. ``generated`` is output from
    before, for which the lane goes on as if it had drawn it.
    """

    def __init__(self, info: Info, prompt: np.ndarray, max_tokens: int, attention: Attention, sampling: Sampling,
                 generated: np.ndarray | None = None, scoring: Scoring | None = None, id: int = 0) -> None:
        """Token arrays are uint32. ValueError for one that the model does not know."""
        known = len(prompt) + (0 if generated is None else len(generated))
        capacity = max(len(prompt) + max_tokens, known)
        self.id, self.attention, self.scoring, self.info = id, attention, scoring, info
        self.n_prompt, self.length, self.position = len(prompt), known, 0
        self.sees = attention.pinned + attention.window if attention.window else capacity  # most keys of one query
        self.draws = max_tokens > 0
        self.tokens = np.empty(capacity, np.uint32)
        self.tokens[: self.n_prompt] = prompt
        if generated is not None:
            self.tokens[self.n_prompt : known] = generated
        if known and int(self.tokens[:known].max()) >= info.vocab:
            raise ValueError(f"a token id is outside the vocabulary of {info.vocab}")
        # Rows whose logits are scored: each tells of the token after it.
        self.scored_from = self.scored_to = 0
        if scoring and scoring.first < scoring.last:
            self.scored_from, self.scored_to = scoring.first - 1, scoring.last - 1
        self.target = known if self.draws else self.scored_to
        self.most = max(capacity - 1, self.target)  # tokens that will ever be computed
        self.n_slabs = self.n_held = 0  # entries of the table, and those of them that are still ours
        self.slabs = np.empty(-(-capacity // info.slab_tokens), np.uint32)
        self._base = ffi.from_buffer("uint32_t[]", self.tokens)
        self._table = ffi.from_buffer("uint32_t[]", self.slabs)
        self._describe(sampling)

    def _describe(self, sampling: Sampling) -> None:
        """Everything about sampling that stays the same."""
        self.sampling, self._kept = sampling.describe(self.info.vocab)
        self._own_mask = self.sampling.allowed
        self.sampling.prompt, self.sampling.n_prompt = self._base, self.n_prompt
        self.sampling.generated = self._base + self.n_prompt
        self.wants_logprob = sampling.logprobs is not None

    def bar(self, ids: np.ndarray) -> None:
        """These tokens are not to be drawn, until lift()."""
        if self._kept[0] is None:
            mask = np.full(-(-self.info.vocab // 32), 0xFFFFFFFF, np.uint32)
        else:
            mask = self._kept[0].copy()
        np.bitwise_and.at(mask, ids >> 5, ~(np.uint32(1) << (ids & 31)))
        self._barred = mask
        self.sampling.allowed = ffi.from_buffer("uint32_t[]", mask)

    def lift(self) -> None:
        self.sampling.allowed = self._own_mask

    def add_slabs(self, slabs: Sequence[int]) -> None:
        """For the positions that follow the table's."""
        end = self.n_slabs + len(slabs)
        self.slabs[self.n_slabs : end] = slabs
        self.n_slabs, self.n_held = end, self.n_held + len(slabs)

    @property
    def first_slab(self) -> int:
        """The slab of position 0, -1 while there is none: lanes that have it in common begin with the same tokens."""
        return int(self.slabs[0]) if self.n_slabs else -1

    @property
    def cacheable(self) -> int:
        """Most tokens whose keys and values the lane can do without computing: all before the first whose logits are
        still wanted."""
        return self.scored_from if self.scored_from < self.scored_to else self.length - 1

    def start(self, position: int, slabs: Iterable[tuple[int, int]]) -> None:
        """The first ``position`` tokens, whole slabs, at most ``cacheable``, are in the KV cache already. slabs: (index
        in the table, slab) of those that a query sees from there on. Before the first step or after rewind()."""
        self.n_slabs, self.n_held, self.position = position // self.info.slab_tokens, 0, position
        self.slabs[: self.n_slabs] = lib.COLIBRI_NO_SLAB
        for index, slab in slabs:
            self.slabs[index] = slab
            self.n_held += 1

    def drop_slab(self, index: int) -> None:
        """The slab of positions [index * slab_tokens, (index + 1) * slab_tokens) is no longer ours; none sees it."""
        self.slabs[index] = lib.COLIBRI_NO_SLAB
        self.n_held -= 1

    def rewind(self) -> None:
        """Nothing is computed any more, and no slab is ours. Else as redo()."""
        self.redo(0)
        self.n_slabs = self.n_held = 0

    def redo(self, position: int) -> None:
        """Computes all from this position on again, into the same slabs. The text stays, and gives the same
        continuation; what was scored is not scored again."""
        self.scored_from = max(self.scored_from, min(self.position, self.scored_to))
        self.position = position

    def wanted(self, rows: int) -> int:
        """First of the next ``rows`` rows whose logits are used; rows if none is."""
        if self.position < self.scored_to:
            return min(max(self.scored_from - self.position, 0), rows)
        return rows - 1 if self.draws and self.position + rows == self.length else rows

    def describe(self, entry: Any) -> None:
        """What does not change from step to step, into a colibri_sequence_t."""
        entry.struct_size, entry.id = _ENTRY, self.id
        entry.pinned, entry.window = self.attention.pinned, self.attention.window
        entry.positions, entry.slabs = self.attention.positions, self._table

    def fill(self, entry: Any, rows: int) -> None:
        """The rest, for a step that computes the next ``rows`` tokens."""
        entry.n_tokens, entry.logits_from = rows, self.wanted(rows)
        entry.tokens, entry.position, entry.n_slabs = self._base + self.position, self.position, self.n_slabs

    def append(self, token: int) -> None:
        """A drawn token, to be computed next."""
        self.tokens[self.length] = token
        self.length = self.target = self.length + 1


class Batch:
    """The steps of one engine. The lanes of a step may be any; those that keep their place cost least, and neighbours
    that begin with the same slabs share the reading of them."""

    def __init__(self, engine: Engine, arena: KvMemory, max_sequences: int) -> None:
        """max_sequences: most lanes of a step, at most the engine's own."""
        self.info, self._runtime = engine.info, engine.runtime
        self._output = Buffer(lib.COLIBRI_OUTPUT, (max_sequences + SCORED_ROWS) * self.info.vocab * 4)
        self._logits = ffi.cast("float *", self._output.ptr)
        self._entries = ffi.new("colibri_sequence_t[]", max_sequences)
        self._seats = [(self._entries + i)[0] for i in range(max_sequences)]
        self._seated: list[Lane | None] = [None] * max_sequences
        self._arena = arena
        self._c = self._runtime.batch(arena.buffer, self._output)
        self._c.sequences = self._entries
        self._sample = new("colibri_sample_t")
        self._draws, self._rows = self._describe_rows(max_sequences)

    def _describe_rows(self, count: int) -> tuple[Any, list[tuple[Any, Any, Any]]]:
        """colibri_draw_t[count], and of each the struct, its sample and its error."""
        draws = ffi.new("colibri_draw_t[]", count)
        rows = [((draws + i)[0], new("colibri_sample_t"), new("colibri_error_t")) for i in range(count)]
        for draw, sample, error in rows:
            draw.struct_size, draw.sample, draw.error = ffi.sizeof("colibri_draw_t"), sample, error
        return draws, rows

    def run(self, work: Sequence[tuple[Lane, int]]) -> list[Outcome]:
        """Computes the next so many tokens of each lane and draws or scores where that was what the lane waits for.

        The lanes must have slabs for them; at most SCORED_ROWS rows may be scored; a lane's rows must not reach over
        the end of what it has scored. EngineError if the step as a whole was refused or cancelled: then no lane has
        moved.
        """
        seats, seated = self._seats, self._seated
        for i, (lane, rows) in enumerate(work):
            if seated[i] is not lane:
                lane.describe(seats[i])
                seated[i] = lane
            lane.fill(seats[i], rows)
        self._c.n_sequences = len(work)
        self._runtime.forward(self._c)
        drawing: list[tuple[int, Lane]] = []
        outcomes = [self._finish(i, lane, rows, seats[i], drawing) for i, (lane, rows) in enumerate(work)]
        if drawing:
            self._draw(drawing, outcomes)
        return outcomes

    def _finish(self, place: int, lane: Lane, rows: int, entry: Any, drawing: list[tuple[int, Lane]]) -> Outcome:
        """What the step gave this lane, which moves on. None for one that draws, which is put into ``drawing`` with its
        place in the step."""
        if entry.status != lib.COLIBRI_OK:
            return Failed(entry.status, "logits, keys or values are NaN or infinite")
        made = rows - entry.logits_from
        start, lane.position = lane.position, lane.position + rows
        if not made:
            return None
        logits = self._logits + entry.logits_row * self.info.vocab
        if start < lane.scored_to:
            return self._score(lane, logits, made)
        draw, sampling = self._rows[len(drawing)][0], lane.sampling
        sampling.position, sampling.n_generated = lane.length, lane.length - lane.n_prompt
        draw.sampling, draw.logits = sampling, logits
        drawing.append((place, lane))
        return None

    def _draw(self, drawing: list[tuple[int, Lane]], outcomes: list[Outcome]) -> None:
        """Draws for all of them in one call, over the engine's threads, and fills in what they got."""
        runtime = self._runtime
        check(lib.colibri_sample_rows(runtime.model, self._draws, len(drawing), runtime.scratch.c, runtime.err),
              runtime.err)
        for (place, lane), (draw, sample, error) in zip(drawing, self._rows, strict=False):
            if draw.status != lib.COLIBRI_OK:
                outcomes[place] = _failed(draw.status, error)
                continue
            token = sample.token
            lane.append(token)
            outcomes[place] = Drawn(token, sample.logprob, *_top(sample)) if lane.wants_logprob else Drawn(token)

    def _score(self, lane: Lane, logits: Any, count: int) -> Outcome:
        """The tokens after each of the last ``count`` rows."""
        runtime, sample, top = self._runtime, self._sample, lane.scoring.top if lane.scoring else 0
        first = lane.position - count + 1
        logprobs, alternatives = np.empty(count, np.float32), []
        for i, token in enumerate(lane.tokens[first : first + count].tolist()):
            row = logits + i * self.info.vocab
            status = lib.colibri_score(runtime.model, row, token, top, sample, runtime.err)
            if status != lib.COLIBRI_OK:
                return _failed(status, runtime.err)
            logprobs[i] = sample.logprob
            alternatives.append(_top(sample))
        ids, values = (b"".join(column) for column in zip(*alternatives, strict=True))
        return Scored(first, logprobs.tobytes(), ids, values)
