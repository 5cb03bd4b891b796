"""The same bits, whatever the instruction set, chunks, neighbours in a batch, threads, slabs and memory.

Every property compares the logits of one text with those of the reference: instruction set ref, one thread, the text in
one step, alone, slabs of 64 tokens, KV memory zeroed. All comparisons are of bytes. What a host's FTZ and DAZ do not
change is tests/unit/engine/test_fpenv.c.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from colibri_engine import Engine
from colibri_engine._colibri import lib
from colibri_engine.binding import ISA_NAMES
from colibri_engine.sequence import KvArena
from colibri_engine.sequence import Sequence as Text
from fixtures.models import CONTAINER_FORMATS, Models
from fixtures.smol import Smol
from hypothesis import given, settings
from hypothesis import strategies as st

ISAS = [name for name, level in ISA_NAMES.items() if level <= lib.colibri_best_isa()]
NAN_BYTES = 0xFF  # NaN as f16 and as f32
EXAMPLES, MANY_EXAMPLES = 12, int(os.environ.get("COLIBRI_EXAMPLES", 300))  # the latter under `-m full`


@dataclass(frozen=True)
class Case:
    """A model, a text and what the text attends to."""

    folder: Path
    tokens: tuple[int, ...]
    kv_format: str = "f16"
    pinned: int = 0
    window: int = 0
    positions: str = "cache"


@dataclass(frozen=True)
class Way:
    """How a case is computed; the defaults are the reference."""

    isa: str = "ref"
    threads: int = 1
    slab_tokens: int = 64
    chunks: tuple[int, ...] = ()  # lengths of the steps, over and over; () = one step
    fill: int = 0  # byte that the KV memory starts with
    neighbours: int = 0  # seed of the other texts in each step; 0 = none


def pieces(tokens: np.ndarray, chunks: Sequence[int]) -> Iterator[np.ndarray]:
    lengths = chunks or (len(tokens),)
    at = turn = 0
    while at < len(tokens):
        yield tokens[at : at + lengths[turn % len(lengths)]]
        at += lengths[turn % len(lengths)]
        turn += 1


class Neighbours:
    """Random texts around a step's own, one before and one after, which may be new ones at any step."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine, self._rng = engine, np.random.default_rng(seed)
        self._texts = [self._text(), self._text()]

    def _text(self) -> Text:
        masks = [(0, 0, "cache"), (2, 5, "cache"), (3, 4, "absolute"), (0, 6, "absolute")]
        return Text(self._engine.attention(*masks[self._rng.integers(len(masks))]), self._engine.info.slab_tokens)

    def _part(self, text: Text) -> tuple[Text, np.ndarray, int]:
        tokens = self._rng.integers(0, self._engine.info.vocab, self._rng.integers(1, 12)).astype(np.uint32)
        return text, tokens, int(self._rng.integers(0, len(tokens) + 1))

    def around(self, own: tuple[Text, np.ndarray, int], arena: KvArena) -> list[tuple[Text, np.ndarray, int]]:
        for i, text in enumerate(self._texts):
            if text.position > 100 or self._rng.random() < 0.2:
                text.close(arena)
                self._texts[i] = self._text()
        before, after = self._texts
        return [self._part(before), own, self._part(after)]


def logits(case: Case, way: Way) -> bytes:
    """Logits after every token of the case: the bytes of float32 [n_tokens, vocab]."""
    tokens, found = np.array(case.tokens, dtype=np.uint32), []
    with Engine.open(case.folder, way.threads, isa=way.isa, kv_format=case.kv_format, slab_tokens=way.slab_tokens,
                     max_context=1024) as engine:  # fmt: skip
        assert engine.info.isa == way.isa
        text = Text(engine.attention(case.pinned, case.window, case.positions), way.slab_tokens)
        arena = engine.arena(-(-len(tokens) // way.slab_tokens) + 24)
        arena.buffer.array(np.uint8, arena.buffer.size)[:] = way.fill
        others = Neighbours(engine, way.neighbours) if way.neighbours else None
        for part in pieces(tokens, way.chunks):
            own = (text, part, 0)
            rows = engine.step(others.around(own, arena), arena)[1] if others else engine.step([own], arena)[0]
            found.append(rows.tobytes())
    return b"".join(found)


def check(case: Case, chunks: tuple[int, ...], seed: int, ways: Mapping[str, Way]) -> None:
    """Everything that must not show, one at a time and together."""
    expected = logits(case, Way())
    assert np.isfinite(np.frombuffer(expected, dtype=np.float32)).all()
    for name, way in ways.items():
        for isa in ISAS:
            drawn = {"chunks": chunks if way.chunks else (), "neighbours": seed if way.neighbours else 0}
            actual = replace(way, isa=isa, **drawn)
            assert logits(case, actual) == expected, f"{name}: {actual}"


TOGETHER = Way(threads=3, slab_tokens=16, chunks=(1,), fill=NAN_BYTES, neighbours=1)
# chunks and neighbours are placeholders for the drawn ones
WAYS = {
    "run twice": Way(),
    "any chunks": Way(chunks=(1,)),
    "in a batch": Way(neighbours=1),
    "2 threads": Way(threads=2),
    "3 threads": Way(threads=3),
    "slabs of 16": Way(slab_tokens=16),
    "slabs of 32": Way(slab_tokens=32),
    "memory of NaN": Way(fill=NAN_BYTES),
    "all of it": TOGETHER,
}


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, int]:
    """Awkward sizes: nothing needs to be a multiple of a panel, a block or a vector."""
    kv_heads, experts = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    return {
        "vocab": draw(st.integers(2, 90)),
        "hidden": draw(st.integers(3, 100)),
        "layers": draw(st.integers(1, 2)),
        "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.integers(1, 4)),
        "head_dim": 2 * draw(st.integers(1, 21)),
        "inter": draw(st.integers(1, 100)),
        "experts": experts,
        "top_k": draw(st.integers(1, min(experts, 4))),
        "tied_head": draw(st.integers(0, 1)),
    }


@st.composite
def masks(draw: st.DrawFn) -> dict[str, Any]:
    window = draw(st.one_of(st.just(0), st.integers(1, 30)))
    return {
        "window": window,
        "pinned": draw(st.integers(0, 20)) if window else 0,
        "positions": draw(st.sampled_from(["cache", "absolute"])),
        "kv_format": draw(st.sampled_from(["f16", "f32"])),
    }


CHUNKS = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple)
SEEDS = st.integers(1, 2**32 - 1)


@st.composite
def random_cases(draw: st.DrawFn) -> tuple[dict[str, int], list[int], dict[str, Any]]:
    """(geometry, tokens, mask)"""
    geometry = draw(geometries())
    tokens = draw(st.lists(st.integers(0, geometry["vocab"] - 1), min_size=1, max_size=60))
    return geometry, tokens, draw(masks())


def check_random(models: Models, fmt: str, drawn: Any, chunks: tuple[int, ...], seed: int) -> None:
    geometry, tokens, mask = drawn
    check(Case(models.random(geometry, fmt), tuple(tokens), **mask), chunks, seed, WAYS)


@pytest.mark.parametrize("fmt", CONTAINER_FORMATS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(drawn=random_cases(), chunks=CHUNKS, seed=SEEDS)
def test_random_geometries(models: Models, fmt: str, drawn: Any, chunks: tuple[int, ...], seed: int) -> None:
    check_random(models, fmt, drawn, chunks, seed)


@pytest.mark.full
@pytest.mark.parametrize("fmt", CONTAINER_FORMATS)
@settings(max_examples=MANY_EXAMPLES, deadline=None)
@given(drawn=random_cases(), chunks=CHUNKS, seed=SEEDS)
def test_many_random_geometries(models: Models, fmt: str, drawn: Any, chunks: tuple[int, ...], seed: int) -> None:
    check_random(models, fmt, drawn, chunks, seed)


# ---- trained, long and large -----------------------------------------------------------------------------------------

SOME_WAYS = {"run twice": Way(), "2 threads": Way(threads=2, chunks=(1,)), "all of it": TOGETHER}


def random_text(length: int, vocab: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(0, vocab, length).tolist())


@pytest.mark.parametrize("kv_format", ["f16", "f32"])
@pytest.mark.parametrize("fmt", CONTAINER_FORMATS)
def test_trained_model(models: Models, fmt: str, kv_format: str) -> None:
    case = Case(models.tiny(fmt), random_text(48, 1000), kv_format, pinned=5, window=20)
    check(case, (7, 1, 13), 3, SOME_WAYS)


@pytest.mark.parametrize("positions", ["cache", "absolute"])
def test_a_text_of_many_slabs(models: Models, positions: str) -> None:
    case = Case(models.random({"vocab": 50}, "q8"), random_text(240, 50), "f16", 20, 90, positions)
    check(case, (1, 1, 1, 30), 4, SOME_WAYS)


# Dot products of 4096 and more: in the projections of the hidden state, and over inter and all heads.
LONG_ROWS = {
    "hidden": {"hidden": 4096, "heads": 2, "kv_heads": 1, "head_dim": 16, "inter": 40, "experts": 2},
    "inter": {"hidden": 72, "heads": 130, "kv_heads": 2, "head_dim": 32, "inter": 4130, "experts": 2},
}


@pytest.mark.parametrize("fmt", CONTAINER_FORMATS)
@pytest.mark.parametrize("size", LONG_ROWS)
def test_long_rows(models: Models, size: str, fmt: str) -> None:
    case = Case(models.random(LONG_ROWS[size] | {"layers": 2, "vocab": 33}, fmt), random_text(7, 33))
    check(case, (3, 1), 5, SOME_WAYS)


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Smol:
    return Smol(tmp_path_factory.mktemp("smol"))


@pytest.mark.full
@pytest.mark.parametrize("fmt", CONTAINER_FORMATS)
def test_upcycled_model(smol: Smol, fmt: str) -> None:
    check(Case(smol.model(fmt), random_text(24, 49152), pinned=4, window=12), (5, 1), 6, SOME_WAYS)
