"""Who is suspected of ending workers, where suspects run, and who is refused for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from colibri_daemon.common.job import Job
from colibri_daemon.dispatcher.poison import (
    FRUITLESS_MOST,
    OWN_DOING,
    PROBATION_TOKENS,
    Poisoned,
    Verdict,
    identity,
    is_cleared,
    judge,
    kept_apart,
)
from dispatched import ids
from hypothesis import given
from hypothesis import strategies as st

CAUSES = ("fault", "exit", "hang", "killed", "unknown", "stopped")


@pytest.mark.parametrize("cause", ["fault", "exit", "hang"])
def test_two_deaths_of_its_own_doing_are_proof(cause: str) -> None:
    assert judge(False, 1, cause, in_step=True) is Verdict.SUSPECT
    assert judge(True, 1, cause, in_step=True) is Verdict.POISONED


@pytest.mark.parametrize("cause", ["killed", "unknown"])
def test_kills_count_after_five_in_a_row(cause: str) -> None:
    verdicts = [judge(False, fruitless, cause, in_step=True) for fruitless in range(FRUITLESS_MOST + 1)]
    assert verdicts == [Verdict.INNOCENT] * FRUITLESS_MOST + [Verdict.SUSPECT]
    assert judge(True, FRUITLESS_MOST + 1, cause, in_step=True) is Verdict.POISONED


@given(st.booleans(), st.integers(0, 99), st.sampled_from(CAUSES))
def test_whoever_was_not_in_the_step_is_as_before(suspect: bool, fruitless: int, cause: str) -> None:
    """But a request must not end workers between their steps for ever."""
    again = fruitless >= FRUITLESS_MOST and cause in OWN_DOING
    assert judge(suspect, fruitless, cause, in_step=False) == suspect + again


@given(st.booleans(), st.integers(0, 99))
def test_a_worker_that_was_stopped_says_nothing(suspect: bool, fruitless: int) -> None:
    assert judge(suspect, fruitless, "stopped", in_step=True) == suspect


def test_cleared_past_the_place() -> None:
    assert not is_cleared(10 + PROBATION_TOKENS - 1, struck_at=10)
    assert is_cleared(10 + PROBATION_TOKENS, struck_at=10)


# ---- workers for suspects ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Host:
    load: int = 0
    tries: bool = False


hosts = st.lists(st.builds(Host, st.integers(0, 9), st.booleans()), max_size=9)


@given(hosts, st.integers(0, 12))
def test_workers_kept_for_suspects(workers: list[Host], suspects: int) -> None:
    kept = kept_apart(workers, suspects)
    trying = sum(host.tries for host in workers)
    assert len(kept) == min(len(workers), max(trying, min(trying + suspects, max(1, len(workers) // 2))))
    others = [host for host in workers if host not in kept]
    assert all((not a.tries, a.load) <= (not b.tries, b.load) for a in kept for b in others)


def test_the_worker_that_has_one_stays_kept() -> None:
    busy, trying, empty = Host(5), Host(1, tries=True), Host(0)
    assert kept_apart([busy, empty, trying], 1) == [trying]
    assert kept_apart([busy, empty, trying, Host(2)], 1) == [trying, empty]
    both = [Host(1, tries=True), Host(1, tries=True)]
    assert kept_apart([busy, *both], 0) == both  # one of four workers was lost: they stay alone all the same
    assert kept_apart([busy, empty], 0) == []


# ---- the same request ----------------------------------------------------------------------------------------------

JOB = Job(ids(5, 6), max_tokens=9, temperature=0.5, seed=3, stop_seqs=(ids(1),), logit_bias={7: 1.0, 8: -1.0})


@pytest.mark.parametrize("change", [
    {"tokens": ids(5, 7)}, {"max_tokens": 8}, {"temperature": 0.6}, {"stop_seqs": (ids(2),)}, {"logit_bias": {7: 1.0}},
    {"eos_ids": ids(2)}, {"logprobs": 3}, {"window": 64},
])  # fmt: skip
def test_what_decides_the_tokens_makes_another_request(change: dict[str, object]) -> None:
    assert identity(replace(JOB, **change), 3) != identity(JOB, 3)


@pytest.mark.parametrize("change", [
    {"generated": ids(1, 2)}, {"salt": b"s"}, {"cache": False}, {"seed": 4}, {"prompt_logprobs": 1},
    {"logit_bias": {8: -1.0, 7: 1.0}},
])  # fmt: skip
def test_what_does_not_is_the_same_request(change: dict[str, object]) -> None:
    assert identity(replace(JOB, **change), 3) == identity(JOB, 3)


def test_the_seed_counts_if_the_client_gave_it_and_something_is_drawn() -> None:
    assert len({identity(JOB, seed) for seed in (None, 0, 1)}) == 3
    greedy = replace(JOB, temperature=0.0)
    assert len({identity(greedy, seed) for seed in (None, 0, 1)}) == 1


# ---- memory --------------------------------------------------------------------------------------------------------


def test_remembered_for_its_owner_and_a_while() -> None:
    poisoned = Poisoned(seconds=600.0)
    assert not poisoned
    poisoned.remember("a", b"x", 100.0)
    assert poisoned
    assert poisoned.seconds_left("a", b"x", 400.0) == 300.0
    assert poisoned.seconds_left("b", b"x", 400.0) == poisoned.seconds_left("a", b"y", 400.0) == 0
    assert poisoned.seconds_left("a", b"x", 700.0) == 0
    assert not poisoned


def test_bounded_and_whoever_keeps_asking_stays() -> None:
    poisoned = Poisoned(most=3)
    for name in (b"1", b"2", b"3"):
        poisoned.remember("a", name, 0.0)
    assert poisoned.seconds_left("a", b"1", 0.0)
    poisoned.remember("a", b"4", 0.0)
    assert len(poisoned) == 3
    known = [name for name in (b"1", b"2", b"3", b"4") if poisoned.seconds_left("a", name, 0.0)]
    assert known == [b"1", b"3", b"4"]
