"""Requests that leave a worker before their end: it was lost, they gave way, or another generation goes on with them.

What there is so far becomes the beginning of the job; the next worker attaches what is committed of it, computes the
rest as one prefill and goes on with the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from colibri_protocol.errors import InvalidMessage

from ..common import ipc, log
from .admission import foregone
from .endings import generation_gone, poisoned
from .generation import Generation, Generations
from .losses import Death, Losses
from .poison import Poisoned, Verdict, identity, judge
from .stats import Stats
from .streams import Leaving, Match, Phase, Stream
from .workers import Worker, WorkerId

_log = log.get("requests")


class Ends(Protocol):
    """Who ends requests, and assigns those that wait."""

    def end(self, stream: Stream, finish: str, error: InvalidMessage | None = None) -> None: ...

    def end_forced(self, stream: Stream) -> None: ...

    def computed(self, stream: Stream, finish: str, match: Match) -> None: ...

    def pump(self) -> None: ...


class Moves:
    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float], generations: Generations,
                 stats: Stats, ends: Ends, left: Callable[[Stream], None], poisoned: Poisoned) -> None:
        """left(stream) is called when a worker has a stream no more. poisoned: gets what was proven."""
        self._generations, self._stats, self._ends, self._left = generations, stats, ends, left
        self._clock, self._poisoned = clock, poisoned
        self._losses = Losses(loop, self._bereaved)

    def close(self) -> None:
        self._losses.close()

    # ---- a worker is lost --------------------------------------------------------------------------------------------

    def worker_lost(self, worker: Worker, streams: list[Stream]) -> None:
        """Its requests wait until dead() has told how it died, a second or so at most."""
        self._losses.lost(worker, [stream for stream in streams if self._waits(stream)])

    def killed(self, worker: WorkerId, death: Death) -> None:
        """By SIGKILL from outside, and the pool knows. It is not reaped yet."""
        self._losses.killed(worker, death)

    def dead(self, worker: WorkerId, death: Death) -> None:
        """The worker is reaped; the pool knows it too."""
        self._losses.dead(worker, death)

    def _waits(self, stream: Stream) -> bool:
        """For news of its worker. A request whose end was asked for waits only if that says how it ends."""
        self._left(stream)
        stream.lost, stream.phase = "unknown", Phase.LOST
        if stream.forced not in (None, "deadline"):
            self._ends.end_forced(stream)
        return stream.phase is Phase.LOST

    def _bereaved(self, worker: Worker, death: Death, streams: list[Stream]) -> None:
        """Who is left waits in front of all others for any worker; suspects for one of their own."""
        moving = [stream for stream in streams if stream.phase is Phase.LOST and self._goes_on(stream, death)]
        if moving:
            _log.warning("worker lost, its requests move", worker=worker.slot, worker_pid=worker.pid,
                         requests=len(moving), cause=death.cause)
            self._stats.add("request_takeovers_total", len(moving))
        for stream in moving:
            self._put_back(stream)
        self._ends.pump()

    def _goes_on(self, stream: Stream, death: Death) -> bool:
        """If not, it ends."""
        stream.lost = death.cause
        if not self._is_poisoned(stream, death):
            if stream.forced is None:
                return self._has_a_rest(stream)
            self._ends.end_forced(stream)
            return False
        stream.phase = Phase.HELD
        self._stats.add("poison_requests_total")
        self._poisoned.remember(stream.owner, identity(stream.job, stream.asked_seed), self._clock())
        self._ends.end(stream, "error", poisoned())
        return False

    def _is_poisoned(self, stream: Stream, death: Death) -> bool:
        """Whether that is proven now. It may become a suspect."""
        if death.cause != "stopped":
            stream.fruitless = 0 if stream.progress > stream.mark else stream.fruitless + 1
        suspect = stream.struck_at is not None
        in_step = stream.key in death.keys or death.cause == "unknown"
        verdict = judge(suspect, stream.fruitless, death.cause, in_step)
        if verdict is Verdict.SUSPECT and not suspect:
            stream.struck_at = stream.progress
            _log.warning("request is suspected", id=stream.id, connection=stream.connection, uid=stream.owner[0],
                         cause=death.cause, progress=stream.progress)
        return verdict is Verdict.POISONED

    # ---- it gave way -------------------------------------------------------------------------------------------------

    def preempted(self, stream: Stream) -> None:
        """It waits at its place in the order until there is room; or, if it moves, in front."""
        if stream.moving:
            if self._has_a_rest(stream):
                self._put_back(stream)
            return
        if stream.leaving is Leaving.PLACE:
            stream.displaced += 1
        else:
            stream.preemptions += 1
        self._stats.add("num_preemptions_total")
        if self._has_a_rest(stream):
            self._put_again(stream)

    # ---- a worker has come -------------------------------------------------------------------------------------------

    def spread(self, worker: Worker) -> None:
        """Others keep their share of what they run, the rest moves to the worker that has come; if somebody waits, that
        one fills it."""
        generation = next((g for g in self._generations if worker in g.workers), None)
        if generation is None or len(generation.queue):
            return
        hosts = [host for host in generation.workers if host.loaded]
        share = -(-sum(len(host.running) for host in hosts) // len(hosts))
        for host in hosts:
            for stream in list(host.running.values())[share:]:
                if not stream.is_leaving:
                    self._move_on(stream)

    def _move_on(self, stream: Stream) -> None:
        """To another worker, in front of all who wait."""
        assert stream.worker is not None  # it runs
        stream.moving = True
        stream.worker.say(ipc.PREEMPT, stream.key)

    # ---- another generation serves -----------------------------------------------------------------------------------

    def take_over(self, serving: Generation) -> None:
        """What older generations have to serve goes on in this one where it can."""
        for generation in self._generations:
            if generation is not serving:
                for stream in list(generation.streams.values()):
                    if serving.takes_over(stream):
                        self._move(stream, serving)
        self._ends.pump()

    def _move(self, stream: Stream, to: Generation) -> None:
        waits = stream.phase is Phase.QUEUED
        if waits:
            stream.generation.queue.remove(stream)
        del stream.generation.streams[stream.key]
        stream.generation = to
        to.streams[stream.key] = stream
        if waits:
            self._put_again(stream)
        elif stream.worker is not None:
            self._move_on(stream)

    def give_up(self, generation: Generation) -> None:
        """It will never work again: whatever it still has to serve ends."""
        for stream in list(generation.streams.values()):
            self._ends.end(stream, "error", generation_gone())

    # ---- both --------------------------------------------------------------------------------------------------------

    def _put_back(self, stream: Stream) -> None:
        stream.phase, stream.moving = Phase.QUEUED, False
        if stream.struck_at is None:
            stream.generation.queue.put_back([stream])
        else:
            stream.generation.queue.put_apart(stream)

    def _put_again(self, stream: Stream) -> None:
        stream.phase = Phase.QUEUED
        if stream.struck_at is None:
            stream.generation.queue.put_again(stream)
        else:
            stream.generation.queue.put_apart(stream)

    def _has_a_rest(self, stream: Stream) -> bool:
        """Whether a stream that its worker has no more has something left to compute, which its job is then. If not,
        it ends."""
        stream.phase = Phase.HELD
        stream.continue_elsewhere()
        if stream.forced is not None:
            self._ends.end_forced(stream)
        elif (answer := foregone(stream.job)) is not None:
            self._ends.computed(stream, *answer)
        else:
            return True
        return False
