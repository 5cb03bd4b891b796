"""How the budget of a step follows what steps take."""

from __future__ import annotations

import random

import pytest
from colibri_daemon.worker.pace import Pace
from hypothesis import given
from hypothesis import strategies as st


def steady(pace: Pace, seconds_per_row: float, steps: int) -> float:
    """What a full step takes in the end, on a machine of this speed."""
    for _ in range(steps):
        pace.took(pace.rows, pace.rows * seconds_per_row)
    return pace.rows * seconds_per_row


def test_a_machine_as_fast_as_measured_has_the_whole_budget() -> None:
    pace = Pace(most=100, least=8, bound=0.1)
    assert steady(pace, 0.001, 20) == pytest.approx(0.1)
    assert steady(pace, 0.0006, 40) == pytest.approx(0.06)


def test_a_slower_machine_gets_shorter_chunks_until_steps_fill_the_bound() -> None:
    pace = Pace(most=100, least=8, bound=0.1)
    assert steady(pace, 0.004, 3) < 0.12
    assert steady(pace, 0.004, 60) == pytest.approx(0.1, rel=0.02)


def test_it_comes_back() -> None:
    pace = Pace(most=100, least=8, bound=0.1)
    steady(pace, 0.02, 20)
    assert pace.rows == 8
    steady(pace, 0.0006, 60)
    assert pace.rows == 100


@pytest.mark.parametrize("spread", [0.05, 0.2, 0.4])
def test_steps_that_differ_keep_the_bound_too(spread: float) -> None:
    pace, rng, over = Pace(most=500, least=8, bound=0.1), random.Random(1), 0
    for step in range(2100):
        seconds = pace.rows * 0.002 * max(0.2, rng.gauss(1, spread))
        over += step >= 100 and seconds > 0.1
        pace.took(pace.rows, seconds)
    assert over <= 20  # of 2000: one in a hundred
    assert pace.rows * 0.002 > 0.1 / (1 + 5 * spread)  # and no more is given away than that takes


def test_one_accident_is_soon_forgotten() -> None:
    pace = Pace(most=100, least=8, bound=0.1)
    pace.took(100, 0.3)
    assert 25 < pace.rows < 50
    steady(pace, 0.001, 40)
    assert pace.rows > 90


def test_short_steps_say_nothing_of_longer_ones() -> None:
    pace = Pace(most=100, least=8, bound=0.1)
    for _ in range(99):
        pace.took(10, 0.09)
    assert pace.rows == 100


def test_without_a_bound_nothing_changes() -> None:
    pace = Pace(most=100, least=8, bound=float("inf"))
    steady(pace, 10.0, 10)
    assert pace.rows == 100


@given(st.lists(st.tuples(st.floats(0, 600), st.floats(0, 100))))
def test_it_stays_within_its_limits(steps: list[tuple[float, float]]) -> None:
    pace = Pace(most=512, least=8, bound=0.1)
    for rows, seconds in steps:
        pace.took(rows, seconds)
        assert 8 <= pace.rows <= 512
