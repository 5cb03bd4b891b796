"""The state × event table of a child: every cell, the promises of ARCHITECTURE.md, and what no sequence may do."""

from __future__ import annotations

import signal

import pytest
from colibri_daemon.common.exit_codes import Exit
from colibri_daemon.supervisor.lifecycle import (
    ABORT_SECONDS,
    BACKOFF_MOST,
    EVENTS,
    FAILED_STARTS,
    NEVER,
    RUNNING,
    SETTLED,
    STOP_SECONDS,
    TABLE,
    Event,
    Exited,
    GiveUp,
    Hung,
    Kill,
    Life,
    Ready,
    RestartCap,
    Signal,
    Spawn,
    Spawned,
    State,
    Stop,
    Tick,
    advance,
    backoff,
)
from hypothesis import given
from hypothesis import strategies as st

FINAL_STATES = (State.STOPPED, State.FAILED)
CRASH = -int(signal.SIGSEGV)


def after(*events: Event, life: Life | None = None) -> Life:
    life = life or Life()
    for event in events:
        life, _ = advance(life, event)
    return life


def samples(kind: type[Event], now: float) -> list[Event]:
    """Every way an event of this kind can look."""
    if kind is Exited:
        codes = (0, 1, CRASH, *(int(code) for code in Exit))
        flags = [(proven, foreign) for proven in (False, True) for foreign in (False, True)]
        return [Exited(now, code, *flag) for code in codes for flag in flags]
    return [kind(now)]


@pytest.mark.parametrize("state", State)
def test_every_state_takes_every_event(state):
    assert set(TABLE) == set(State)
    assert set(TABLE[state]) == set(EVENTS)
    for kind in EVENTS:
        for event in samples(kind, 5.0):
            life, actions = advance(Life(state, since=1.0, until=3.0, failures=1, spawns=1), event)
            assert life.state in State
            assert all(isinstance(action, Spawn | Signal | GiveUp) for action in actions)


def test_a_start():
    assert advance(Life(), Tick(1))[1] == (Spawn(),)
    assert advance(Life(), Tick(1))[0] == Life()  # not carried out: asked for again
    assert after(Spawned(1)).state is State.LOADING
    assert after(Spawned(1), Ready(2)).state is State.READY


def test_a_proven_process_is_started_again_at_once():
    life = after(Spawned(1), Ready(2), Exited(3, CRASH, proven=True))
    assert (life.state, life.failures, life.wakes()) == (State.DOWN, 0, 3)
    assert advance(life, Tick(3))[1] == (Spawn(),)


def test_a_proven_process_clears_the_count_of_failed_starts():
    life = after(Spawned(1), Exited(1, 1), Tick(2), Spawned(2), Exited(2, 1))
    assert life.failures == 2
    assert after(Tick(9), Spawned(9), Exited(9, 1, proven=True), life=life).failures == 0


def test_a_failed_start_backs_off():
    life, actions = advance(after(Spawned(1)), Exited(10, 1))
    assert (life.state, life.until, actions) == (State.BACKOFF, 10.1, ())
    assert advance(life, Tick(10.05)) == (life, ())
    woken, actions = advance(life, Tick(10.1))
    assert (woken.state, actions) == (State.DOWN, (Spawn(),))


def test_back_off_doubles_to_its_most():
    waits = [backoff(n) for n in range(1, 30)]
    assert waits[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert waits[-1] == max(waits) == BACKOFF_MOST


@pytest.mark.parametrize("code", [1, 0, CRASH, Exit.INTERNAL, Exit.USAGE])
def test_five_failed_starts_in_a_row_give_up(code):
    life, actions = Life(), ()
    for n in range(FAILED_STARTS):
        assert actions == ()
        life, actions = advance(after(Tick(100.0 * n), Spawned(100.0 * n), life=life), Exited(100.0 * n + 1, code))
    assert (life.state, actions) == (State.FAILED, (GiveUp(Exit.BOOT_LOOP),))


def test_a_process_that_cannot_be_forked_is_a_failed_start():
    life = Life()
    for n in range(FAILED_STARTS):
        life = after(Tick(100.0 * n), Exited(100.0 * n, Exit.INTERNAL), life=life)
    assert (life.state, life.spawns) == (State.FAILED, 0)


def test_being_ready_with_nothing_to_do_is_no_failed_start():
    assert after(Spawned(0), Ready(9), Exited(9 + SETTLED, CRASH)).state is State.DOWN
    assert after(Spawned(0), Ready(9), Exited(9 + SETTLED / 2, CRASH)).state is State.BACKOFF
    assert after(Spawned(0), Exited(9 + SETTLED, CRASH)).state is State.BACKOFF  # loading is not being ready
    assert after(Spawned(0), Ready(9), Hung(99), Exited(99, CRASH)).state is State.BACKOFF  # in its first step


def test_leaving_in_good_order_is_no_failed_start():
    assert after(Spawned(0), Ready(9), Exited(9, Exit.STOPPED)).state is State.DOWN
    assert after(Spawned(0), Exited(9, Exit.STOPPED)).state is State.BACKOFF


@pytest.mark.parametrize("proven", [False, True])
@pytest.mark.parametrize(
    ("code", "actions"), [(Exit.CANNOT_LOAD, (GiveUp(Exit.CANNOT_LOAD),)), (Exit.WEIGHTS_CHANGED, ())]
)
def test_some_exit_codes_give_up_at_once(code, actions, proven):
    life, done = advance(after(Spawned(0)), Exited(1, code, proven))
    assert (life.state, done) == (State.FAILED, actions)


def test_kills_from_outside_are_never_too_many():
    life, waits = Life(), []
    for n in range(200):
        life = after(Tick(100.0 * n), Spawned(100.0 * n), Exited(100.0 * n, -9, foreign=True), life=life)
        assert life.state is State.BACKOFF
        waits.append(life.until - life.since)
    assert (waits[:3], waits[-1]) == (pytest.approx([0.1, 0.2, 0.4]), BACKOFF_MOST)
    assert (life.failures, life.kills) == (0, 200)
    life = after(Tick(1e6), Spawned(1e6), Exited(1e6, CRASH), life=life)
    assert (life.state, life.failures) == (State.BACKOFF, 1)  # its own failures count as before
    assert after(Tick(2e6), Spawned(2e6), Exited(2e6, -9, proven=True), life=life).kills == 0


def test_a_kill_that_was_ours_counts():
    life = after(Spawned(0), Hung(1), Tick(9), Exited(9, -9, foreign=True))
    assert (life.failures, life.kills) == (1, 0)


@pytest.mark.parametrize("before", [(Spawned(0),), (Spawned(0), Ready(1))])
def test_a_hung_process_is_aborted_then_killed(before):
    life, actions = advance(after(*before), Hung(20))
    assert (life.state, actions) == (State.HUNG, (Signal(signal.SIGABRT),))
    assert advance(life, Tick(19.9 + ABORT_SECONDS))[1] == ()
    life, actions = advance(life, Tick(20 + ABORT_SECONDS))
    assert actions == (Signal(signal.SIGKILL),)
    assert advance(life, Tick(1000))[1] == ()  # once
    assert after(Exited(1001, -9, proven=True), life=life).state is State.DOWN


def test_a_stop_asks_first():
    life, actions = advance(after(Spawned(0), Ready(1)), Stop(5))
    assert (life.state, actions) == (State.STOPPING, (Signal(signal.SIGTERM),))
    assert advance(life, Stop(6)) == (life, ())  # saying it again does not put it off
    life, actions = advance(life, Tick(5 + STOP_SECONDS))
    assert actions == (Signal(signal.SIGKILL),)
    assert after(Exited(11, Exit.CANNOT_LOAD), life=life).state is State.STOPPED


def test_a_hung_process_is_not_asked():
    assert advance(after(Spawned(0), Hung(1)), Stop(2))[1] == (Signal(signal.SIGKILL),)


@pytest.mark.parametrize("event", [Stop(9), Kill(9)])
@pytest.mark.parametrize("before", [(), (Spawned(0), Exited(1, 1))])
def test_stopping_what_does_not_run(before, event):
    assert advance(after(*before), event)[1] == ()
    assert after(*before, event).state is State.STOPPED


EVENT = st.one_of(
    *(st.builds(kind, st.just(0.0)) for kind in EVENTS if kind is not Exited),
    st.builds(Exited, st.just(0.0), st.sampled_from([0, 1, CRASH, -9, 4, 6, 70]), st.booleans(), st.booleans()),
)


@given(st.lists(st.tuples(EVENT, st.floats(0, 100)), max_size=60))
def test_any_sequence(steps):
    """A process is only signalled where there is one; final states are final; a wait has an end."""
    life, now = Life(), 0.0
    for event, pause in steps:
        now += pause
        before = life
        life, actions = advance(before, type(event)(**{**event.__dict__, "now": now}))
        if before.state in FINAL_STATES:
            assert (life, actions) == (before, ())
        if any(isinstance(action, Signal) for action in actions):
            assert before.state in RUNNING
            assert life.state in RUNNING
        if Spawn() in actions:
            assert before.state in (State.DOWN, State.BACKOFF)
        gives_up = any(isinstance(action, GiveUp) for action in actions)
        ended = life.state is State.FAILED and before.state is not State.FAILED
        assert gives_up == (ended and getattr(event, "code", 0) != Exit.WEIGHTS_CHANGED)
        if life.state is State.BACKOFF:
            assert life.until <= life.since + BACKOFF_MOST
        assert 0 <= life.failures <= FAILED_STARTS
        assert before.spawns <= life.spawns <= before.spawns + 1


@given(st.lists(st.tuples(EVENT, st.floats(0, 100)), max_size=20))
def test_a_stop_ends_everything(steps):
    """Whatever came before: Stop, then Ticks at the times it asks for, leads to SIGKILL or to nothing running."""
    life, now = Life(), 0.0
    for event, pause in steps:
        now += pause
        life = after(type(event)(**{**event.__dict__, "now": now}), life=life)
    stopping, actions = advance(life, Stop(now))
    while stopping.running and Signal(signal.SIGKILL) not in actions and stopping.wakes() != NEVER:
        stopping, actions = advance(stopping, Tick(stopping.wakes()))
    assert not after(Exited(now, -9), life=stopping).running


def test_the_restart_cap():
    cap = RestartCap(most=3, seconds=1.0)
    for now in (5.0, 5.1, 5.2):
        assert cap.free_at() <= now
        cap.take(now)
    assert cap.free_at() == 6.0
    cap.take(6.0)
    assert cap.free_at() == pytest.approx(6.1)
