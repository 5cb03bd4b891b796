"""The state × event table of a reload: every cell, its course, and what no sequence may do."""

from __future__ import annotations

import pytest
from colibri_daemon.supervisor.reload import (
    EVENTS,
    IN_WORDS,
    STOPPING,
    TABLE,
    Asked,
    Checked,
    Course,
    Do,
    Ending,
    Event,
    Failed,
    Free,
    Loaded,
    Report,
    State,
    Switched,
    advance,
)
from hypothesis import given
from hypothesis import strategies as st

COURSE = (Asked(1), Free(2), Checked(3), Loaded(4), Switched(5))


def after(*events: Event) -> Course:
    course = Course()
    for event in events:
        course, _ = advance(course, event)
    return course


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", EVENTS)
def test_every_state_takes_every_event(state, kind):
    assert set(TABLE) == set(State)
    assert set(TABLE[state]) == set(EVENTS)
    course, actions = advance(Course(state, 1.0, 1.0), kind(5.0))
    assert course.state in State
    assert all(isinstance(action, Do | Report) for action in actions)


def test_a_reload():
    course, done, states = Course(), [], []
    for event in COURSE:
        course, actions = advance(course, event)
        done += actions
        states.append(course.state)
    assert states == [State.WAITING, State.CHECKING, State.LOADING, State.SWITCHING, State.IDLE]
    assert done == [Do.BEGIN, Do.LAUNCH, Do.SWITCH, Do.SERVE, Report("", 3)]  # from when it could begin


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_a_failure_changes_nothing(steps):
    course, actions = advance(after(*COURSE[:steps]), Failed(9, "why"))
    assert (course.state, actions) == (State.IDLE, (Do.ABANDON, Report("why", 7)))


def test_a_late_failure_is_none():
    assert advance(after(*COURSE), Failed(9, "why")) == (after(*COURSE), ())


@pytest.mark.parametrize("steps", [2, 3, 4])
@pytest.mark.parametrize("times", [1, 5])
def test_who_asks_meanwhile_gets_one_more(steps, times):
    course = after(*COURSE[:steps], *[Asked(6)] * times)
    course, _ = advance(course, Failed(7, "why"))
    assert (course.state, course.again) == (State.WAITING, False)
    assert after(*COURSE[:steps], Asked(6), *COURSE[steps:]).state is State.WAITING


def test_who_asks_before_it_begins_is_served_by_it():
    assert after(Asked(1), Asked(2), *COURSE[1:]).state is State.IDLE


def test_everything_is_for_the_reload_it_was_asked_for():
    assert after(Asked(1), Asked(2, True)).everything
    meanwhile = after(Asked(1), Free(2), Asked(3, True))
    assert not meanwhile.everything
    again, _ = advance(meanwhile, Failed(4, "why"))
    assert (again.state, again.everything) == (State.WAITING, True)
    assert not after(Asked(1, True), *COURSE[1:]).everything


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_the_end_of_the_service_ends_it(steps):
    course, actions = advance(after(*COURSE[:steps], Asked(6)), Ending(8))
    assert (course.state, actions[0], actions[1].reason) == (State.OVER, Do.ABANDON, STOPPING)
    assert advance(course, Asked(9)) == (course, (Report(STOPPING, 0.0),))


def test_the_end_without_a_reload_has_nothing_to_report():
    assert advance(Course(), Ending(8))[1] == ()


def test_health_has_words_for_all_that_goes_on():
    assert set(IN_WORDS) == set(State) - {State.IDLE, State.OVER}


EVENT = st.one_of(*(st.builds(kind, st.just(0.0)) for kind in EVENTS), st.just(Asked(0.0, True)))


@given(st.lists(EVENT, max_size=60))
def test_any_sequence(events):
    """What was started is either served or abandoned, once; each begun reload is reported once; none is forgotten."""
    course = Course()
    begun = reported = started = 0
    for event in events:
        before = course
        course, actions = advance(course, event)
        begun += Do.BEGIN in actions
        if Do.LAUNCH in actions:
            assert started == 0
            started = 1
        if Do.SERVE in actions:
            assert started == 1
            assert isinstance(actions[-1], Report)
            assert not actions[-1].reason
        if Do.SERVE in actions or Do.ABANDON in actions:
            started = 0
        reported += before.state not in (State.WAITING, State.OVER) and any(isinstance(a, Report) for a in actions)
        if before.state is State.IDLE and isinstance(event, Asked):
            assert course.state is State.WAITING
        if before.again and course.state not in (before.state, State.OVER):
            assert course.state is State.WAITING or course.again
    under_way = course.state in (State.CHECKING, State.LOADING, State.SWITCHING)
    assert begun == reported + under_way
