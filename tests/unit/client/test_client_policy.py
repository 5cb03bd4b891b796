"""When the client tries again: pure functions."""

from __future__ import annotations

from typing import Any

import pytest
from colibri_client.errors import RequestError, from_wire
from colibri_client.retry import Policy
from colibri_protocol.errors import CODES, Code, retryable
from colibri_protocol.messages import Error
from hypothesis import given
from hypothesis import strategies as st


def error(code: Code, **fields: Any) -> RequestError:
    return from_wire(Error(code=code, message="so", retryable=retryable(code, 0), **fields))



@pytest.mark.parametrize("chance", [0.0, 0.999])
def test_the_schedule_doubles_up_to_a_limit(chance: float) -> None:
    policy = Policy(base=0.1, most=1.0, chance=lambda: chance)
    full = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert [policy.delay(n) for n in range(1, 7)] == pytest.approx([x * (0.5 + chance / 2) for x in full])


@given(attempt=st.integers(1, 10_000), after=st.floats(0, 1e6), chance=st.floats(0, 1, exclude_max=True))
def test_never_sooner_than_told(attempt: int, after: float, chance: float) -> None:
    delay = Policy(chance=lambda: chance).delay(attempt, after)
    assert after <= delay <= after + Policy.most


@pytest.mark.parametrize("code", Code)
def test_only_what_can_help_is_tried_again_three_times(code: Code) -> None:
    again = CODES[code].retry in ("yes", "after", "unsent", "elsewhere")
    tries = [Policy().again(error(code), attempt) is not None for attempt in (1, 2, 3, 4)]
    assert tries == [again, again, again, False]


def test_reconnecting_is_at_once_then_slower_and_ends() -> None:
    policy = Policy(reconnect=10, base=1.0, most=100.0, chance=lambda: 0.5)
    assert policy.reconnect_after(1, 0.0) == 0.0
    assert policy.reconnect_after(2, 0.1) == 0.75
    assert policy.reconnect_after(3, 1.0) == 1.5
    assert policy.reconnect_after(9, 9.5) == 0.5  # a last attempt at the end
    assert policy.reconnect_after(4, 10.1) is None
    assert Policy(reconnect=0).reconnect_after(1, 0.0) is None
