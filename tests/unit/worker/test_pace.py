"""How the budget of a step follows what steps take."""

from __future__ import annotations

import pytest
from colibri_daemon.worker.pace import Pace
from hypothesis import given
from hypothesis import strategies as st


def steady(pace: Pace, seconds_per_row: float, steps: int) -> float:
    """What a full step takes in the end, on a machine of this speed."""
    for _ in range(steps):
        pace.took(pace.rows, pace.rows * seconds_per_row)
    return pace.rows * seconds_per_row


def test_a_slower_machine_gets_shorter_chunks_until_steps_keep_the_bound() -> None:
    pace = Pace(most=100, least=8, bound=0.1)
    assert steady(pace, 0.0006, 3) == pytest.approx(0.06)
    assert 0.06 < steady(pace, 0.004, 20) < 0.1


def test_it_comes_back() -> None:
    pace = Pace(most=100, least=8, bound=0.1)
    steady(pace, 0.02, 20)
    assert pace.rows == 8
    steady(pace, 0.0006, 40)
    assert pace.rows == 100


def test_one_accident_costs_half_at_most() -> None:
    pace = Pace(most=100, least=8, bound=0.1)
    pace.took(100, 30.0)
    assert pace.rows == 50


def test_steps_that_are_not_full_say_nothing_of_larger_ones() -> None:
    pace = Pace(most=100, least=8, bound=0.1)
    pace.took(100, 0.2)
    for _ in range(9):
        pace.took(10, 0.01)
    assert pace.rows == 50


@given(st.lists(st.tuples(st.floats(0, 600), st.floats(0, 100))))
def test_it_stays_within_its_limits(steps: list[tuple[float, float]]) -> None:
    pace = Pace(most=512, least=8, bound=0.1)
    for rows, seconds in steps:
        pace.took(rows, seconds)
        assert 8 <= pace.rows <= 512
