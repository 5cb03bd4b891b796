"""Steps over many lanes: what a batch draws and scores is what the Engine gives for each text alone."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from colibri_engine import Engine, EngineError
from colibri_engine._colibri import lib
from colibri_engine.batch import SCORED_ROWS, Batch, Drawn, Failed, Lane, Scored, Scoring
from colibri_engine.binding import Sampling
from colibri_engine.sequence import KvArena, KvMemory
from fixtures.models import Models
from fixtures.worker import poisoned

VOCAB, SLAB = 40, 16
PROMPT = np.array([1, 2, 3, 4, 5, 6, 7], np.uint32)


@pytest.fixture(scope="module")
def folder(models: Models) -> Path:
    return models.random({"vocab": VOCAB})


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.open(folder, slab_tokens=SLAB, max_sequences=8) as opened:
        yield opened


@pytest.fixture
def arena(engine: Engine) -> KvArena:
    return engine.arena(40)


@pytest.fixture
def batch(engine: Engine, arena: KvArena) -> Batch:
    return Batch(engine, arena, 8)


def lane(engine: Engine, arena: KvArena, prompt: Any = PROMPT, max_tokens: int = 10, pinned: int = 0, window: int = 0,
         generated: Any = None, scoring: Scoring | None = None, id: int = 1, **sampling: Any) -> Lane:
    made = Lane(engine.info, np.asarray(prompt, np.uint32), max_tokens, engine.attention(pinned, window, "cache"),
                Sampling(**sampling), generated, scoring, id)
    made.add_slabs(arena.take(len(made.slabs)))
    return made


def drawn(batch: Batch, *lanes: Lane, count: int) -> list[list[Drawn]]:
    """Runs prefill and decode together until each lane has ``count`` tokens."""
    found: list[list[Drawn]] = [[] for _ in lanes]
    while any(len(tokens) < count for tokens in found):
        work = [(each, each.target - each.position) for each, tokens in zip(lanes, found, strict=True)
                if len(tokens) < count]  # fmt: skip
        places = [tokens for tokens in found if len(tokens) < count]
        for outcome, tokens in zip(batch.run(work), places, strict=True):
            assert isinstance(outcome, Drawn)
            tokens.append(outcome)
    return found


def ids(tokens: list[Drawn]) -> list[int]:
    return [token.token for token in tokens]


# ---- drawing ---------------------------------------------------------------------------------------------------------

HOW = [
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.2, "seed": 6, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": -0.2},
    {"logit_bias": {3: 2.5, 39: -4.0}, "allowed": frozenset(range(1, 40, 2))},
]


def test_lanes_together_draw_what_each_draws_alone(engine: Engine, arena: KvArena, batch: Batch) -> None:
    lanes = [lane(engine, arena, PROMPT[: i + 2], 12, id=i + 1, **how) for i, how in enumerate(HOW)]
    for i, (how, tokens) in enumerate(zip(HOW, drawn(batch, *lanes, count=12), strict=True)):
        assert ids(tokens) == engine.generate(PROMPT[: i + 2], 12, **how)
        assert lanes[i].tokens.tolist() == [*PROMPT[: i + 2], *ids(tokens)]


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_draw_what_one_draws(folder: Path, engine: Engine, threads: int) -> None:
    with Engine.open(folder, threads, slab_tokens=SLAB, max_sequences=8) as several:
        arena = several.arena(40)
        lanes = [lane(several, arena, PROMPT[: i + 2], 12, id=i + 1, logprobs=3, **how) for i, how in enumerate(HOW)]
        found = drawn(Batch(several, arena, 8), *lanes, count=12)
    arena = engine.arena(40)
    alone = [lane(engine, arena, PROMPT[: i + 2], 12, id=i + 1, logprobs=3, **how) for i, how in enumerate(HOW)]
    batch = Batch(engine, arena, 1)
    assert found == [drawn(batch, one, count=12)[0] for one in alone]


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunks_give_nothing_until_the_last(engine: Engine, arena: KvArena, batch: Batch, chunk: int) -> None:
    one = lane(engine, arena)
    outcomes = []
    while one.position < len(PROMPT):
        outcomes += batch.run([(one, min(chunk, len(PROMPT) - one.position))])
    assert outcomes[:-1] == [None] * (len(outcomes) - 1)
    assert outcomes[-1] == Drawn(engine.generate(PROMPT, 1)[0])


@pytest.mark.parametrize("how", HOW)
def test_going_on_after_earlier_output(engine: Engine, arena: KvArena, batch: Batch, how: dict[str, Any]) -> None:
    expected = engine.generate(PROMPT, 10, **how)
    for kept in (1, 5, 9):
        one = lane(engine, arena, generated=np.array(expected[:kept], np.uint32), **how)
        assert ids(drawn(batch, one, count=10 - kept)[0]) == expected[kept:]
        for slab in one.slabs.tolist():
            arena.give(slab)


def test_a_lane_that_was_rewound_draws_the_same(engine: Engine, arena: KvArena, batch: Batch) -> None:
    one = lane(engine, arena, temperature=1.0, seed=3)
    first = ids(drawn(batch, one, count=4)[0])
    one.rewind()
    assert (one.position, one.target, one.n_slabs) == (0, 11, 0)
    one.add_slabs(arena.take(2))
    assert first + ids(drawn(batch, one, count=6)[0]) == engine.generate(PROMPT, 10, temperature=1.0, seed=3)


def test_a_window_needs_no_slab_out_of_view(engine: Engine, arena: KvArena, batch: Batch) -> None:
    one = lane(engine, arena, max_tokens=60, pinned=3, window=20)
    found = drawn(batch, one, count=35)[0]
    one.drop_slab(1)  # positions 16..31; those up to 41 - 20 are seen no more
    assert one.n_held == len(one.slabs) - 1
    with pytest.raises(EngineError, match=r"slabs\[1\]"):
        batch.run([(one, 1)])
    one.slabs[1] = 1
    found += drawn(batch, one, count=10)[0]
    one.drop_slab(1)
    found += drawn(batch, one, count=15)[0]
    assert ids(found) == engine.generate(PROMPT, 60, pinned=3, window=20)


def test_log_probabilities(engine: Engine, arena: KvArena, batch: Batch) -> None:
    plain, two = lane(engine, arena, logprobs=0), lane(engine, arena, logprobs=2, id=2)
    for wanted, tokens in zip((0, 2), drawn(batch, plain, two, count=6), strict=True):
        expected = list(engine.stream(PROMPT, 6, logprobs=wanted))
        for token, sample in zip(tokens, expected, strict=True):
            assert (token.token, token.logprob) == (sample.token, sample.logprob)
            top = zip(np.frombuffer(token.top_ids, "<u4"), np.frombuffer(token.top_logprobs, "<f4"), strict=True)
            assert tuple(top) == sample.top


def test_barred_tokens_are_not_drawn_until_lifted(engine: Engine, arena: KvArena, batch: Batch) -> None:
    best = engine.generate(PROMPT, 1)[0]
    free = lane(engine, arena)
    few = lane(engine, arena, allowed=frozenset({best, 11, 12}), id=2)
    for one in (free, few):
        one.bar(np.array([best, 33], np.uint32))
    allowed = frozenset(range(VOCAB)) - {best, 33}
    expected = engine.generate(PROMPT, 1, allowed=allowed), engine.generate(PROMPT, 1, allowed=frozenset({11, 12}))
    assert tuple(ids(tokens) for tokens in drawn(batch, free, few, count=1)) == expected
    free.lift()
    few.lift()
    after = [engine.generate([*PROMPT, *expected[0]], 1)[0],
             engine.generate([*PROMPT, *expected[1]], 1, allowed=frozenset({best, 11, 12}))[0]]  # fmt: skip
    assert [ids(tokens)[0] for tokens in drawn(batch, free, few, count=1)] == after


# ---- scoring ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [1, 4, 7])
@pytest.mark.parametrize("chunk", [1, 3, 6])
def test_scores_are_the_engines(engine: Engine, arena: KvArena, batch: Batch, first: int, chunk: int) -> None:
    one = lane(engine, arena, max_tokens=0, scoring=Scoring(first, 7, 3))
    rows = engine.logits(PROMPT)
    assert one.target == (6 if first < 7 else 0)
    values, tops = [], []
    while one.position < one.target:
        outcome = batch.run([(one, min(chunk, one.target - one.position))])[0]
        if outcome is not None:
            assert isinstance(outcome, Scored)
            assert outcome.first == first + len(values)
            values += np.frombuffer(outcome.logprobs, "<f4").tolist()
            tops += np.frombuffer(outcome.top_ids, "<u4").reshape(-1, 3).tolist()
    expected = [engine.score(rows[i - 1], int(PROMPT[i]), 3) for i in range(first, 7)]
    assert values == [sample.logprob for sample in expected]
    assert tops == [[id for id, _ in sample.top] for sample in expected]


def test_a_prompt_is_scored_and_then_continued(engine: Engine, arena: KvArena, batch: Batch) -> None:
    one, other = lane(engine, arena, scoring=Scoring(1, 7)), lane(engine, arena, id=2)
    scored, first = batch.run([(one, 6), (other, 7)])
    assert isinstance(scored, Scored)
    assert np.frombuffer(scored.logprobs, "<f4").tolist() == engine.logprobs(PROMPT).tolist()
    assert scored.top_ids == scored.top_logprobs == b""
    assert batch.run([(one, 1)]) == [first]
    one.rewind()
    one.add_slabs(arena.take(2))
    assert batch.run([(one, 6)]) == [None]  # once is enough


def test_as_many_rows_as_are_promised_can_be_scored(engine: Engine, arena: KvArena, batch: Batch) -> None:
    text = np.arange(SCORED_ROWS + 1, dtype=np.uint32)
    scoring = lane(engine, arena, text, 0, scoring=Scoring(1, len(text)))
    others = [lane(engine, arena, id=2 + i) for i in range(7)]
    outcomes = batch.run([*((other, 7) for other in others), (scoring, SCORED_ROWS)])
    assert outcomes[:7] == [Drawn(engine.generate(PROMPT, 1)[0])] * 7
    assert isinstance(outcomes[7], Scored)
    assert np.frombuffer(outcomes[7].logprobs, "<f4").tolist() == engine.logprobs(text).tolist()


# ---- failing ---------------------------------------------------------------------------------------------------------


def test_a_lane_that_overflows_fails_alone(folder: Path, tmp_path: Path) -> None:
    with Engine.open(poisoned(folder, tmp_path / "model", 5), slab_tokens=SLAB) as engine:
        arena = engine.arena(20)
        batch = Batch(engine, arena, 3)
        lanes = [lane(engine, arena, prompt, id=i + 1) for i, prompt in enumerate(([1, 2], [3, 5, 1], [4, 6]))]
        outcomes = batch.run([(each, len(each.tokens) - 10) for each in lanes])
        assert isinstance(outcomes[1], Failed)
        assert outcomes[1].status == lib.COLIBRI_NON_FINITE
        assert lanes[1].position == 0
        good = [outcomes[0], outcomes[2]]
        for _ in range(3):
            good += batch.run([(lanes[0], 1), (lanes[2], 1)])
        assert ids(good[::2]) == engine.generate([1, 2], 4)
        assert ids(good[1::2]) == engine.generate([4, 6], 4)


def test_a_lane_with_nothing_to_draw_fails_alone(engine: Engine, arena: KvArena, batch: Batch) -> None:
    none, wrong, good = (lane(engine, arena, id=1, allowed=frozenset()), lane(engine, arena, id=2, top_p=3.0),
                         lane(engine, arena, id=3))  # fmt: skip
    outcomes = batch.run([(none, 7), (wrong, 7), (good, 7)])
    assert [type(outcome) for outcome in outcomes] == [Failed, Failed, Drawn]
    assert outcomes[0].status == lib.COLIBRI_NO_TOKEN
    assert "top_p" in outcomes[1].message


def test_a_step_that_is_refused_moves_nobody(engine: Engine, arena: KvArena, batch: Batch) -> None:
    good, without = lane(engine, arena), lane(engine, arena, id=2)
    without.n_slabs = 0
    with pytest.raises(EngineError, match="slabs"):
        batch.run([(good, 7), (without, 7)])
    assert good.position == without.position == 0
    engine.cancel()
    with pytest.raises(EngineError, match="cancel"):
        batch.run([(good, 7)])
    assert batch.run([(good, 7)]) == [Drawn(engine.generate(PROMPT, 1)[0])]


def test_a_token_outside_the_vocabulary_makes_no_lane(engine: Engine, arena: KvArena) -> None:
    for prompt, generated in (([1, VOCAB], None), ([1], [VOCAB + 7])):
        with pytest.raises(ValueError, match="outside the vocabulary of 40"):
            lane(engine, arena, prompt, generated=generated)


def test_steps_after_close_are_an_error(engine: Engine, arena: KvArena, batch: Batch) -> None:
    one = lane(engine, arena)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        batch.run([(one, 7)])


# ---- progress in memory of the caller --------------------------------------------------------------------------------


def test_progress_is_counted_where_the_caller_looks(folder: Path) -> None:
    shared = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    with Engine.open(folder, progress=shared[:8]) as engine:
        engine.logits(PROMPT)
        count = int.from_bytes(shared[:8], "little")
        assert 0 < count == engine.progress
        assert not any(shared[8:64])


def test_progress_in_memory_that_will_not_do(folder: Path) -> None:
    page = memoryview(bytearray(64))
    wrong = ((page[:4], "too small"), (memoryview(bytes(8)), "read-only|writable"), (page[3:11], "aligned"))
    for memory, error in wrong:
        with pytest.raises((ValueError, BufferError), match=error):
            Engine.open(folder, progress=memory)


# ---- memory and prefixes that others made ----------------------------------------------------------------------------


def test_a_lane_starts_behind_slabs_that_another_has_filled(engine: Engine) -> None:
    """In memory that the caller mapped, with a hole where no query sees anything."""
    size = engine.info.slab_tokens
    text = np.arange(3 * size + 5, dtype=np.uint32) % engine.info.vocab
    mapped = mmap.mmap(-1, 20 * engine.info.slab_bytes)
    memory = KvMemory(engine.info, 20, mapped)
    batch, how = Batch(engine, memory, 2), {"pinned": size, "window": size, "temperature": 1.0, "seed": 3}
    attention = engine.attention(size, size, "cache")
    first, second = (Lane(engine.info, text, 9, attention, Sampling(temperature=1.0, seed=3), id=i) for i in (1, 2))
    first.add_slabs([5, 6, 7, 8])
    batch.run([(first, len(text))])
    start, end = 7 * engine.info.slab_bytes, 8 * engine.info.slab_bytes
    assert memory.slab(7) == mapped[start:end] != bytes(end - start)
    assert second.cacheable == len(text) - 1
    second.start(3 * size, [(0, 5), (2, 7)])
    assert (second.position, second.n_slabs, second.n_held) == (3 * size, 3, 2)
    second.add_slabs([9])
    assert ids(drawn(batch, second, count=9)[0]) == engine.generate(text, 9, **how)


def test_what_is_scored_is_not_taken_from_the_cache(engine: Engine, arena: KvArena, batch: Batch) -> None:
    one = lane(engine, arena, scoring=Scoring(4, 7))
    assert one.cacheable == 3
    batch.run([(one, 6)])
    one.rewind()
    assert one.cacheable == len(PROMPT) - 1
    assert lane(engine, arena, scoring=Scoring(7, 7)).cacheable == len(PROMPT) - 1


def test_a_mapping_that_is_too_short(engine: Engine) -> None:
    with mmap.mmap(-1, 4096) as mapped, pytest.raises(ValueError, match="4096 bytes"):
        KvMemory(engine.info, 100, mapped)
