"""The course of a reload: a state × event table, pure, with the time passed in.

    course, actions = advance(course, Checked(now))

One reload at a time. Who asks while one is under way gets another one after it, however many ask. Whatever fails before
the new generation serves changes nothing but what the report says. What is to be done are actions for the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum


class State(Enum):
    IDLE = "idle"
    WAITING = "waiting"  # asked for; the service does not serve yet, or too many old generations are left
    CHECKING = "checking"  # the configuration is accepted, the model is looked at
    LOADING = "loading"  # the new pool and workers start
    SWITCHING = "switching"  # a new dispatcher starts, if there is to be one
    OVER = "over"  # the service ends


# What health says meanwhile.
IN_WORDS = {
    State.WAITING: "waits for an earlier generation",
    State.CHECKING: "the model is being checked",
    State.LOADING: "workers are loading",
    State.SWITCHING: "the new dispatcher is starting",
}


@dataclass(frozen=True)
class Asked:
    """everything: dispatcher and pool are to be replaced whatever has changed."""

    now: float
    everything: bool = False


@dataclass(frozen=True)
class Free:
    """Nothing that it would have to wait for is left."""

    now: float


@dataclass(frozen=True)
class Checked:
    now: float


@dataclass(frozen=True)
class Loaded:
    now: float


@dataclass(frozen=True)
class Switched:
    now: float


@dataclass(frozen=True)
class Failed:
    now: float
    reason: str = ""


@dataclass(frozen=True)
class Ending:
    """The service was asked to stop, or cannot go on."""

    now: float


Event = Asked | Free | Checked | Loaded | Switched | Failed | Ending
EVENTS: tuple[type[Event], ...] = (Asked, Free, Checked, Loaded, Switched, Failed, Ending)


class Do(Enum):
    """BEGIN: read the configuration, start to check. LAUNCH: start the new generation. SWITCH: its dispatcher, if it
    has one. SERVE: let it take over. ABANDON: end what was started."""

    BEGIN = "begin"
    LAUNCH = "launch"
    SWITCH = "switch"
    SERVE = "serve"
    ABANDON = "abandon"


@dataclass(frozen=True)
class Report:
    """How the reload that was under way has ended: reason is empty if well."""

    reason: str
    seconds: float


Action = Do | Report


@dataclass(frozen=True)
class Course:
    """since: when the state was entered; begun: when the reload was asked for, or could begin. everything: of the
    reload under way. again: another one was asked for, next: with everything."""

    state: State = State.IDLE
    since: float = 0.0
    begun: float = 0.0
    everything: bool = False
    again: bool = False
    next: bool = False


Outcome = tuple[Course, tuple[Action, ...]]
STOPPING = "the daemon is stopping"


def advance(course: Course, event: Event) -> Outcome:
    """The course after an event, and what is to be done."""
    return TABLE[course.state][type(event)](course, event)


def _none(course: Course, event: Event) -> Outcome:
    """Late, or nothing to do."""
    return course, ()


def _to(state: State, *actions: Action) -> Callable[[Course, Event], Outcome]:
    return lambda course, event: (replace(course, state=state, since=event.now), actions)


def _wait(course: Course, event: Event) -> Outcome:
    assert isinstance(event, Asked)
    return Course(State.WAITING, event.now, event.now, event.everything), ()


def _join(course: Course, event: Event) -> Outcome:
    """It has not begun: one reload for all who ask."""
    assert isinstance(event, Asked)
    return replace(course, everything=course.everything or event.everything), ()


def _later(course: Course, event: Event) -> Outcome:
    assert isinstance(event, Asked)
    return replace(course, again=True, next=course.next or event.everything), ()


def _begin(course: Course, event: Event) -> Outcome:
    return replace(course, state=State.CHECKING, since=event.now, begun=event.now), (Do.BEGIN,)


def _after(course: Course, now: float) -> Course:
    """What follows a reload that has ended."""
    return Course(State.WAITING if course.again else State.IDLE, now, now, course.next)


def _served(course: Course, event: Event) -> Outcome:
    return _after(course, event.now), (Do.SERVE, Report("", event.now - course.begun))


def _failed(course: Course, event: Event) -> Outcome:
    assert isinstance(event, Failed)
    return _after(course, event.now), (Do.ABANDON, Report(event.reason, event.now - course.begun))


def _end(course: Course, event: Event) -> Outcome:
    return Course(State.OVER, event.now), (Do.ABANDON, Report(STOPPING, event.now - course.begun))


def _refuse(course: Course, event: Event) -> Outcome:
    return course, (Report(STOPPING, 0.0),)


_over = _to(State.OVER)
_ROWS: dict[State, tuple[Callable[[Course, Event], Outcome], ...]] = {
    #                 Asked    Free    Checked                          Loaded
    State.IDLE:      (_wait,   _none,  _none,                           _none,
                      _none,   _none,   _over),
    State.WAITING:   (_join,   _begin, _none,                           _none,
                      _none,   _none,   _end),
    State.CHECKING:  (_later,  _none,  _to(State.LOADING, Do.LAUNCH),   _none,
                      _none,   _failed, _end),
    State.LOADING:   (_later,  _none,  _none,                           _to(State.SWITCHING, Do.SWITCH),
                      _none,   _failed, _end),
    State.SWITCHING: (_later,  _none,  _none,                           _none,
                      _served, _failed, _end),
    State.OVER:      (_refuse, _none,  _none,                           _none,
                      _none,   _none,   _none),
    #                 Switched Failed   Ending
}  # fmt: skip
TABLE = {state: dict(zip(EVENTS, row, strict=True)) for state, row in _ROWS.items()}
