"""Sequences of a batch that begin with the same slabs give the bits that each gives alone: attention reads what they
share once for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from colibri_engine import Engine
from colibri_engine._colibri import lib
from colibri_engine.binding import ISA_NAMES
from colibri_engine.sequence import KvArena, Sequence
from fixtures.models import Models
from hypothesis import example, given, settings
from hypothesis import strategies as st

ISAS = [name for name, level in ISA_NAMES.items() if level <= lib.colibri_best_isa()]
SLAB, MOST = 16, 9  # tokens; shared slabs
MASKS = [(0, 0, "cache"), (0, 150, "cache"), (8, 60, "cache"), (20, 50, "absolute")]


class Branch(Sequence):
    """Begins with another's slabs, and gives none back."""

    def __init__(self, trunk: Sequence, shared: int, mask: Any) -> None:
        super().__init__(mask, SLAB)
        self._table, self.position = trunk._table[:shared], shared * SLAB

    def advance(self, arena: KvArena, tokens: int) -> None:
        self.position += tokens


@dataclass(frozen=True)
class Drawn:
    """shared: whole slabs of the trunk. own: tokens behind them that are computed before, rows: in the step itself."""

    shared: int
    own: int
    rows: int
    mask: int


BRANCH = st.builds(Drawn, st.integers(0, MOST), st.integers(0, 40), st.integers(1, 24), st.integers(0, len(MASKS) - 1))
DECODING = st.builds(Drawn, st.just(MOST), st.integers(0, 20), st.just(1), st.just(0))


@pytest.fixture(scope="module")
def folders(models: Models) -> list[Path]:
    """Of 2, 3 and 4 query heads a group."""
    return [models.random({"heads": heads, "kv_heads": kv, "head_dim": 24}) for heads, kv in ((2, 1), (6, 2), (4, 1))]


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25, deadline=None)
@example(which=0, threads=1, kv_format="f16", seed=0,  # the window of the first one begins to slide within its tile
         branches=[Drawn(MOST, 0, 7, 1), Drawn(MOST, 0, 9, 0)])
@given(which=st.integers(0, 2), threads=st.integers(1, 3), kv_format=st.sampled_from(["f16", "f32"]),
       seed=st.integers(0, 2**31), branches=st.lists(BRANCH | DECODING, min_size=2, max_size=12))  # fmt: skip
def test_a_batch_that_shares_slabs(folders: list[Path], isa: str, which: int, threads: int, kv_format: str, seed: int,
                                   branches: list[Drawn]) -> None:
    rng = np.random.default_rng(seed)
    with Engine.open(folders[which], threads, isa=isa, kv_format=kv_format, slab_tokens=SLAB, max_tokens=300,
                     max_sequences=16) as engine:  # fmt: skip

        def text(length: int) -> np.ndarray:
            return rng.integers(0, engine.info.vocab, length, dtype=np.uint32)

        arena = engine.arena(MOST + 12 * 5)
        trunk = Sequence(engine.attention(*MASKS[0]), SLAB)
        engine.step([(trunk, text(MOST * SLAB), MOST * SLAB)], arena)
        parts, alone = [], []
        for drawn in branches:
            branch = Branch(trunk, drawn.shared, engine.attention(*MASKS[drawn.mask]))
            if drawn.own:
                engine.step([(branch, text(drawn.own), drawn.own)], arena)
            part, before = text(drawn.rows), branch.position
            alone.append(engine.step([(branch, part, 0)], arena)[0].tobytes())
            branch.position = before
            parts.append((branch, part, 0))
        assert [rows.tobytes() for rows in engine.step(parts, arena)] == alone
