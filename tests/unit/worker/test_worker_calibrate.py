"""The prefill chunk: from timings to rows, and the measurement itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from colibri_daemon.common.settings import Settings
from colibri_daemon.worker.calibrate import GENTLE_LEAST, LEAST, MOST, STALL, Calibration, Timing, calibrate, choose
from colibri_daemon.worker.check import check
from colibri_engine import Engine
from fixtures.models import Models


def chosen(one_pass: float, per_row: float, per_key: float = 0.0, step_tokens: int = 0) -> Calibration:
    """From timings as such a machine would give them, the last one 1000 tokens deep."""

    def timing(rows: int, keys: int) -> Timing:
        return Timing(rows, keys, one_pass + rows * (per_row + keys * per_key))

    return choose(timing(8, 0), timing(40, 0), timing(8, 1000), step_tokens)


def test_a_chunk_fills_the_stall_bound() -> None:
    found = chosen(0.02, 0.002, 2e-6)
    assert found.chunk in (39, 40)
    assert found.key_cost == pytest.approx(0.001)
    assert found.stall == pytest.approx(STALL)


def test_a_fast_machine_takes_the_longest_and_a_slow_one_the_shortest() -> None:
    assert chosen(0.0001, 0.00001).chunk == MOST
    slow = chosen(0.0, 0.05)
    assert slow.chunk == LEAST
    assert slow.stall == pytest.approx(LEAST * 0.05)


def test_beside_streams_a_chunk_takes_as_long_as_the_pass_they_need_anyway() -> None:
    assert chosen(0.03, 0.0005).gentle in (59, 60)
    assert chosen(0.001, 0.0005).gentle == GENTLE_LEAST
    assert chosen(0.0001, 0.00002).gentle in (249, 250)  # GENTLE_SECONDS
    slow = chosen(0.02, 0.02)
    assert slow.gentle == slow.chunk < GENTLE_LEAST


def test_with_a_long_pass_a_chunk_takes_as_long_as_the_pass() -> None:
    found = chosen(1.0, 0.01)
    assert found.chunk in (99, 100)
    assert found.stall == pytest.approx(2.0, rel=0.02)


def test_the_bound_covers_the_least_chunk_deep_in_a_text() -> None:
    found = chosen(0.02, 0.002, 2e-5)
    assert found.stall == pytest.approx(0.02 + LEAST * (0.002 + 0.02))


def test_a_configured_chunk_is_used_as_it_is() -> None:
    found = chosen(0.02, 0.002, 2e-6, step_tokens=100)
    assert (found.chunk, found.gentle, found.key_cost) == (100, 100, 0.0)
    assert found.stall == pytest.approx(0.02 + 100 * (0.002 + 0.002))


@pytest.mark.parametrize(("short", "long", "deep"), [(1.0, 0.9, 0.8), (1.0, 1.0, 5.0), (1e-9, 1e-9, 1e-9)])
def test_timings_that_make_no_sense_give_something_possible(short: float, long: float, deep: float) -> None:
    found = choose(Timing(8, 0, short), Timing(40, 0, long), Timing(8, 100, deep), 0)
    assert LEAST <= found.chunk <= MOST
    assert found.key_cost >= 0
    assert found.stall >= STALL


@pytest.mark.parametrize("step_tokens", [0, 1, 100])
@pytest.mark.parametrize("change", [{}, {"window": 0, "pinned": 0}, {"max_len": 3}, {"max_len": 40}])
def test_it_measures_whatever_the_model(models: Models, change: dict[str, int], step_tokens: int) -> None:
    folder = models.random({"vocab": 64})
    facts = replace(check(Settings(model=folder, slab_tokens=16)), **change)
    with Engine.open(folder, slab_tokens=16, max_sequences=2, max_context=facts.max_len) as engine:
        found = calibrate(engine, facts, step_tokens)
        assert found.chunk == step_tokens or LEAST <= found.chunk <= MOST
