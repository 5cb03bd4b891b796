"""What an Engine does and refuses: arguments, life cycle, threads."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from colibri_engine import Engine, EngineError
from colibri_engine._colibri import lib
from colibri_engine.binding import Sampling
from colibri_engine.sequence import Sequence
from fixtures.models import Models

VOCAB = 40
TEXT = [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture(scope="module")
def folder(models: Models) -> Path:
    return models.random({"vocab": VOCAB})


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.open(folder) as opened:
        yield opened


# ---- what it tells ---------------------------------------------------------------------------------------------------


def test_info_is_the_manifest(engine: Engine, folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "inter", "experts", "top_k", "context"):
        assert getattr(engine.info, name) == manifest["geometry"][name]
    assert engine.info.architecture == "mixtral"
    assert engine.info.weight_bytes == sum(f["bytes"] for f in manifest["files"])
    assert engine.info.numerics_class == "exact"


def test_the_model_has_its_own_sliding_window(models: Models) -> None:
    windowed, full = models.random({"vocab": VOCAB, "window": 4}), models.random({"vocab": VOCAB})
    with Engine.open(windowed) as a, Engine.open(full) as b:
        assert (a.info.pinned, a.info.window) == (0, 4)
        assert a.logits(TEXT).tobytes() == b.logits(TEXT, pinned=0, window=4).tobytes()
        assert a.logits(TEXT, window=0).tobytes() == b.logits(TEXT).tobytes()
        assert a.logits(TEXT).tobytes() != b.logits(TEXT).tobytes()


def test_kv_is_as_precise_as_the_weights_unless_said_otherwise(models: Models) -> None:
    sizes = {}
    for fmt, kv in itertools.product(("f32", "f16", "bf16", "q8", "q4"), (None, "f16", "f32")):
        with Engine.open(models.random({"vocab": VOCAB}, fmt), kv_format=kv) as opened:
            sizes[fmt, kv] = opened.info.slab_bytes
    for fmt in ("f32", "f16", "bf16"):
        assert sizes[fmt, None] == sizes[fmt, "f32"] == 2 * sizes[fmt, "f16"]
    for fmt in ("q8", "q4"):
        assert sizes[fmt, None] == sizes[fmt, "f16"] == sizes[fmt, "f32"] / 2


def test_logprobs_and_score_agree_with_logits(engine: Engine) -> None:
    rows = engine.logits(TEXT)
    expected = [engine.score(row, token).logprob for row, token in zip(rows, TEXT[1:], strict=False)]
    assert engine.logprobs(TEXT).tolist() == expected
    assert engine.logprobs(TEXT[:1]).shape == (0,)


def test_generation_is_sampling_from_logits(engine: Engine) -> None:
    how = {"temperature": 0.8, "seed": 9, "repetition_penalty": 1.3}
    tokens = engine.generate(TEXT, 12, **how)
    prompt = np.array(TEXT, dtype=np.uint32)
    for count, token in enumerate(tokens):
        row = engine.logits(TEXT + tokens[:count])[-1]
        generated = np.array(tokens[:count], dtype=np.uint32)
        assert engine.sample(row, Sampling(**how), len(TEXT) + count, prompt, generated).token == token
    assert engine.generate(TEXT, 12, chunk=2, **how) == tokens


def test_generation_ends_with_a_stop_token(engine: Engine) -> None:
    tokens = engine.generate(TEXT, 12)
    stop = tokens[3]
    assert engine.generate(TEXT, 12, stop_ids=[stop]) == tokens[: tokens.index(stop) + 1]
    assert engine.generate(TEXT, 0) == []


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "empty"),
        ([1, -1], "tokens must be in"),
        ([1, 2**32], "tokens must be in"),
        ([1.0, 2.0], "integers"),
        ([1, 2.5], "integers"),
        (["1"], "integers"),
        ([[1, 2]], "flat"),
        ([True, False], "integers"),
        ([None], "integers"),
        ([2**70], "integers"),
        (np.zeros((2, 2), dtype=np.uint32), "flat"),
    ],
)
def test_tokens_that_are_none(engine: Engine, tokens: Any, message: str) -> None:
    for call in (engine.logits, engine.logprobs, lambda ids: engine.generate(ids, 2)):
        with pytest.raises(ValueError, match=message):
            call(tokens)


def test_a_token_outside_the_vocabulary(engine: Engine) -> None:
    with pytest.raises(EngineError, match=rf"tokens\[2\] is {VOCAB}; the vocabulary has {VOCAB}") as caught:
        engine.logits([0, 1, VOCAB])
    assert caught.value.status == lib.COLIBRI_TOKEN_RANGE
    engine.logits([0, 1, VOCAB - 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"isa": "sse9"}, "isa is 'sse9'; choose one of ref, avx2, avx512"),
        ({"kv_format": "q8"}, "kv_format is 'q8'; choose one of f16, f32"),
        ({"routing": "int4"}, "routing is 'int4'; choose one of float, int8"),
        ({"threads": 0}, "threads is 0; it must be at least 1"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"max_context": 2**40}, "max_context is 1099511627776"),
    ],
)
def test_options_that_are_none(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine.open(folder, **options)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"slab_tokens": 24}, "slab_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"max_context": 0}, "max_context"),
    ],
)
def test_options_the_library_refuses(folder: Path, options: dict[str, Any], field: str) -> None:
    with pytest.raises(EngineError, match=field) as caught:
        Engine.open(folder, **options)
    assert caught.value.status == lib.COLIBRI_INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"positions": "relative"}, "positions is 'relative'; choose one of cache, absolute"),
        ({"pinned": 4}, "pinned is 4 but window is 0"),
        ({"pinned": 4, "window": 0}, "pinned is 4 but window is 0"),
        ({"pinned": -1, "window": 4}, "pinned is -1"),
        ({"window": -4}, "window is -4"),
        ({"window": 2**32}, "window is 4294967296"),
        ({"chunk": -1}, "chunk is -1"),
    ],
)
def test_masks_that_are_none(engine: Engine, mask: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.logits(TEXT, **mask)


@pytest.mark.parametrize("shape", [(0,), (VOCAB - 1,), (VOCAB + 1,), (1, VOCAB)])
def test_logits_of_another_vocabulary(engine: Engine, shape: tuple[int, ...]) -> None:
    for call in (lambda row: engine.score(row, 0), lambda row: engine.sample(row, Sampling(), 0)):
        with pytest.raises(ValueError, match=rf"it must be \({VOCAB},\)"):
            call(np.zeros(shape, np.float32))


def test_numbers_that_c_cannot_hold(engine: Engine) -> None:
    row = np.zeros(VOCAB, np.float32)
    with pytest.raises(ValueError, match="token is -1"):
        engine.score(row, -1)
    with pytest.raises(ValueError, match="logprobs is -1"):
        engine.score(row, 0, -1)
    with pytest.raises(ValueError, match="top_k is -1"):
        engine.sample(row, Sampling(top_k=-1), 0)
    with pytest.raises(ValueError, match="seed is -5"):
        engine.sample(row, Sampling(seed=-5), 0)
    with pytest.raises(ValueError, match="tokens must be in"):
        engine.sample(row, Sampling(repetition_penalty=2.0), 0, prompt=np.array([-1]))
    wide = np.array([3], dtype=np.int64)  # the same tokens in another integer type are the same request
    how = Sampling(repetition_penalty=2.0, temperature=1.0)
    assert engine.sample(row, how, 0, prompt=wide) == engine.sample(row, how, 0, prompt=wide.astype(np.uint32))


def test_a_text_longer_than_the_context(folder: Path) -> None:
    with Engine.open(folder, max_context=16) as engine:
        engine.logits([1] * 16)
        with pytest.raises(EngineError, match="position 17; config.max_context is 16") as caught:
            engine.logits([1] * 17)
        assert caught.value.status == lib.COLIBRI_CONTEXT


def test_an_arena_without_room(engine: Engine) -> None:
    arena, first, second = engine.arena(2), *(Sequence(engine.attention(None, None, "cache"), 64) for _ in range(2))
    tokens = np.ones(65, dtype=np.uint32)
    engine.step([(first, tokens[:1], 0)], arena)
    for _ in range(2):  # nothing is lost in the attempt
        with pytest.raises(EngineError, match="has 1 free slabs, 2 are needed") as caught:
            engine.step([(second, tokens, 0)], arena)
        assert caught.value.status == lib.COLIBRI_KV_SLAB
        assert arena.free == 1
    first.close(arena)
    assert len(engine.step([(second, tokens, 64)], arena)[0]) == 1


def test_an_empty_step_is_refused(engine: Engine) -> None:
    with pytest.raises(EngineError, match="n_sequences is 0"):
        engine.step([], engine.arena(1))
    with pytest.raises(EngineError, match="n_tokens is 0"):
        engine.step([(Sequence(engine.attention(None, None, "cache"), 64), np.empty(0, np.uint32), 0)], engine.arena(1))


# ---- life cycle ------------------------------------------------------------------------------------------------------


def test_closing_twice_is_allowed(folder: Path) -> None:
    engine = Engine.open(folder, threads=2)
    engine.logits(TEXT)
    engine.close()
    engine.close()
    with engine:
        pass


CALLS = {
    "logits": lambda e: e.logits(TEXT),
    "logprobs": lambda e: e.logprobs(TEXT),
    "generate": lambda e: e.generate(TEXT, 2),
    "score": lambda e: e.score(np.zeros(VOCAB, np.float32), 1),
    "sample": lambda e: e.sample(np.zeros(VOCAB, np.float32), Sampling(), 0),
    "arena": lambda e: e.step([(Sequence(e.attention(0, 0, "cache"), 64), np.ones(1, np.uint32), 0)], e.arena(1)),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("call", CALLS)
def test_use_after_close_is_an_error(folder: Path, call: str, threads: int) -> None:
    engine = Engine.open(folder, threads)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        CALLS[call](engine)


def test_a_stream_that_outlives_its_engine_is_an_error(folder: Path) -> None:
    engine = Engine.open(folder)
    stream = engine.stream(TEXT, 5)
    next(stream)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        next(stream)


def test_the_context_manager_closes_after_an_exception(folder: Path) -> None:
    with pytest.raises(KeyError), Engine.open(folder) as engine:
        raise KeyError
    with pytest.raises(EngineError, match="closed"):
        engine.logits(TEXT)


def test_logits_outlive_the_engine(folder: Path) -> None:
    with Engine.open(folder) as engine:
        rows = engine.logits(TEXT)
        expected = rows.tobytes()
    assert rows.tobytes() == expected


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_two_engines_in_two_threads(folder: Path, models: Models) -> None:
    """Each with its own model; what they give is what they give alone."""
    folders = [folder, models.random({"vocab": VOCAB}, "q8", 3)]
    expected, found = [], dict[int, list[bytes]]()
    for path in folders:
        with Engine.open(path) as engine:
            expected.append(engine.logits(TEXT * 5).tobytes())
    with Engine.open(folders[0], threads=2) as a, Engine.open(folders[1]) as b:
        def work(index: int, engine: Engine) -> None:
            found[index] = [engine.logits(TEXT * 5).tobytes() for _ in range(20)]

        threads = [threading.Thread(target=work, args=item) for item in enumerate((a, b))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {i: [expected[i]] * 20 for i in range(2)}


def test_python_runs_during_a_step(models: Models) -> None:
    """The GIL is released: this thread counts while another one is inside a single call of the library."""
    heavy = models.random({"vocab": VOCAB, "hidden": 256, "inter": 512}, "f32")
    tokens, running, done = np.ones(256, dtype=np.uint32), threading.Event(), threading.Event()
    with Engine.open(heavy, isa="ref", progress=True) as engine:
        arena, text = engine.arena(4), Sequence(engine.attention(0, 0, "cache"), 64)

        def step() -> None:
            running.set()
            engine.step([(text, tokens, 255)], arena)
            done.set()

        thread = threading.Thread(target=step)
        thread.start()
        running.wait()
        seen = set()
        while not done.is_set():
            seen.add(engine.progress)  # grows only while the library computes
            time.sleep(0)
        thread.join()
    assert len(seen) > 5
