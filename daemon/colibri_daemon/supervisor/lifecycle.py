"""When a child process is started, signalled and given up: a state × event table, pure, with the time passed in.

    life, actions = advance(life, Exited(now, code=-9, proven=True))

The rules: a process that has proven itself (a worker that completed a step, a dispatcher that accepted) is started
again at once; one that has not is a failed start and is tried again after 0.1 s, doubling to 30 s; five failed starts
in a row, or an exit code after which another start would end the same, give the child up. (WEIGHTS_CHANGED ends the
child alone: the others may go on.) Once the service has served,
a start that somebody else's signal ended is tried again the same way but never counted. What is started and signalled
are actions for the caller to carry out; a Spawn that was not carried out is asked for again by the next Tick.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from ..common.exit_codes import Exit

BACKOFF_FIRST, BACKOFF_MOST = 0.1, 30.0  # seconds
FAILED_STARTS = 5  # in a row, then the child is given up
SETTLED = 1.0  # a process that was ready for so long did not fail to start, even if it had nothing to do
ABORT_SECONDS = 2.0  # from SIGABRT (a core, a traceback) to SIGKILL
STOP_SECONDS = 5.0  # from SIGTERM to SIGKILL
NEVER = float("inf")


class State(Enum):
    """DOWN, BACKOFF, STOPPED and FAILED have no process; the others have one."""

    DOWN = "down"  # to be started now
    BACKOFF = "back-off"  # to be started later
    LOADING = "loading"  # runs, is not ready yet
    READY = "ready"
    HUNG = "hung"  # got SIGABRT, then SIGKILL
    STOPPING = "stopping"  # got SIGTERM, then SIGKILL
    STOPPED = "stopped"  # ended because it was asked to; final
    FAILED = "failed"  # given up; final


RUNNING = frozenset({State.LOADING, State.READY, State.HUNG, State.STOPPING})


@dataclass(frozen=True)
class Spawned:
    now: float


@dataclass(frozen=True)
class Ready:
    now: float


@dataclass(frozen=True)
class Hung:
    """It was judged to make no progress."""

    now: float


@dataclass(frozen=True)
class Exited:
    """code: the exit code, or minus the signal. proven: it did what it is for. foreign: a signal from outside ended it,
    and the service has served before. In DOWN: it could not be started."""

    now: float
    code: int
    proven: bool = False
    foreign: bool = False


@dataclass(frozen=True)
class Tick:
    now: float


@dataclass(frozen=True)
class Stop:
    """End it: SIGTERM, SIGKILL if that is not enough."""

    now: float


@dataclass(frozen=True)
class Kill:
    """End it at once."""

    now: float


Event = Spawned | Ready | Hung | Exited | Tick | Stop | Kill
EVENTS: tuple[type[Event], ...] = (Spawned, Ready, Hung, Exited, Tick, Stop, Kill)


@dataclass(frozen=True)
class Spawn:
    """Start a process and say Spawned; or Exited if that fails."""


@dataclass(frozen=True)
class Signal:
    number: signal.Signals


@dataclass(frozen=True)
class GiveUp:
    """The service cannot go on; it ends with this code."""

    code: Exit


Action = Spawn | Signal | GiveUp


@dataclass(frozen=True)
class Life:
    """One child. since: when the state was entered. until: when the next Tick acts (BACKOFF, HUNG, STOPPING).
    failures: failed starts in a row, kills: those that were cut short from outside. spawns: processes started."""

    state: State = State.DOWN
    since: float = 0.0
    until: float = NEVER
    failures: int = 0
    kills: int = 0
    spawns: int = 0

    @property
    def running(self) -> bool:
        return self.state in RUNNING

    @property
    def restarts(self) -> int:
        return max(0, self.spawns - 1)

    def wakes(self) -> float:
        """When a Tick would do something, as a time of the caller's clock; NEVER if none would."""
        return self.since if self.state is State.DOWN else self.until


Outcome = tuple[Life, tuple[Action, ...]]
Transition = Callable[[Life, Event], Outcome]


def advance(life: Life, event: Event) -> Outcome:
    """The life after an event, and what is to be done."""
    return TABLE[life.state][type(event)](life, event)


def backoff(failures: int) -> float:
    """Seconds to wait after so many failed starts in a row."""
    return min(BACKOFF_FIRST * 2.0 ** min(failures - 1, 10), BACKOFF_MOST)


def _enter(life: Life, state: State, event: Event, *actions: Action, until: float = NEVER, **changes: int) -> Outcome:
    return replace(life, state=state, since=event.now, until=until, **changes), actions


def _none(life: Life, event: Event) -> Outcome:
    """Late, or nothing to do."""
    return life, ()


def _spawn(life: Life, event: Event) -> Outcome:
    return life, (Spawn(),)


def _retry(life: Life, event: Event) -> Outcome:
    return _enter(life, State.DOWN, event, Spawn()) if event.now >= life.until else (life, ())


def _loads(life: Life, event: Event) -> Outcome:
    return _enter(life, State.LOADING, event, spawns=life.spawns + 1)


def _serves(life: Life, event: Event) -> Outcome:
    return _enter(life, State.READY, event)


def _abort(life: Life, event: Event) -> Outcome:
    return _enter(life, State.HUNG, event, Signal(signal.SIGABRT), until=event.now + ABORT_SECONDS)


def _overdue(life: Life, event: Event) -> Outcome:
    """SIGABRT or SIGTERM was not enough."""
    if event.now < life.until:
        return life, ()
    return replace(life, until=NEVER), (Signal(signal.SIGKILL),)


def _ended(life: Life, event: Event) -> Outcome:
    assert isinstance(event, Exited)
    if event.code == Exit.WEIGHTS_CHANGED:
        return _enter(life, State.FAILED, event)
    if event.code == Exit.CANNOT_LOAD:
        return _enter(life, State.FAILED, event, GiveUp(Exit.CANNOT_LOAD))
    if event.proven or _settled(life, event):
        return _enter(life, State.DOWN, event, failures=0, kills=0)
    foreign = event.foreign and life.state is not State.HUNG
    failures, kills = life.failures + (not foreign), life.kills + foreign
    if failures >= FAILED_STARTS and not foreign:
        return _enter(life, State.FAILED, event, GiveUp(Exit.BOOT_LOOP), failures=failures)
    until = event.now + backoff(failures + kills)
    return _enter(life, State.BACKOFF, event, until=until, failures=failures, kills=kills)


def _settled(life: Life, event: Exited) -> bool:
    """It served, or left in good order: a worker does when its dispatcher is gone."""
    return life.state is State.READY and (event.now - life.since >= SETTLED or event.code == Exit.STOPPED)


def _stop(life: Life, event: Event) -> Outcome:
    return _enter(life, State.STOPPING, event, Signal(signal.SIGTERM), until=event.now + STOP_SECONDS)


def _kill(life: Life, event: Event) -> Outcome:
    return _enter(life, State.STOPPING, event, Signal(signal.SIGKILL))


def _stopped(life: Life, event: Event) -> Outcome:
    return _enter(life, State.STOPPED, event)


_ROWS: dict[State, tuple[Transition, ...]] = {
    #                Spawned Ready    Hung    Exited    Tick      Stop      Kill
    State.DOWN:     (_loads, _none,   _none,  _ended,   _spawn,   _stopped, _stopped),
    State.BACKOFF:  (_none,  _none,   _none,  _none,    _retry,   _stopped, _stopped),
    State.LOADING:  (_none,  _serves, _abort, _ended,   _none,    _stop,    _kill),
    State.READY:    (_none,  _none,   _abort, _ended,   _none,    _stop,    _kill),
    State.HUNG:     (_none,  _none,   _none,  _ended,   _overdue, _kill,    _kill),
    State.STOPPING: (_none,  _none,   _none,  _stopped, _overdue, _none,    _kill),
    State.STOPPED:  (_none,  _none,   _none,  _none,    _none,    _none,    _none),
    State.FAILED:   (_none,  _none,   _none,  _none,    _none,    _none,    _none),
}  # fmt: skip
TABLE = {state: dict(zip(EVENTS, row, strict=True)) for state, row in _ROWS.items()}


class RestartCap:
    """At most ``most`` restarts in any ``seconds``, over all children: a crash storm must not become a fork storm."""

    def __init__(self, most: int = 10, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self._taken: deque[float] = deque([-NEVER] * most, maxlen=most)

    def free_at(self) -> float:
        """From when on the next restart is allowed."""
        return self._taken[0] + self._seconds

    def take(self, now: float) -> None:
        self._taken.append(now)
