"""The life of every request: admitted, queued, assigned, preempted, taken over from a lost worker, ended exactly once.

Nothing here waits. Each live request has one timer: until it is assigned for the queue limit or its deadline, then for
its deadline. How tokens travel is relay.py's business, in which order requests go queue.py's, when and whereto
placing.py's, who gives way pressure.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from colibri_protocol.errors import Code, InvalidMessage
from colibri_protocol.limits import INITIAL_CREDIT
from colibri_protocol.messages import Generate, Score, TokenCheck, TokenCheckReply

from ..common import ipc, log
from ..common.facts import ModelFacts
from ..common.settings import Settings
from .admission import Admission, Admitted, Capacity, Refused, foregone, never_fits
from .endings import draining, failure, kv_exhausted, log_end, waited_too_long, worker_lost
from .health import HealthBoard
from .placing import Placing
from .pool_link import PoolLink
from .pressure import Pressure
from .queue import RequestQueue
from .relay import Relay
from .stats import FINISHED, Stats
from .streams import TOKEN, UNLIMITED, Match, Phase, Stream
from .workers import Worker, WorkerPool

if TYPE_CHECKING:
    from .session import Session

FRUITLESS_MOST = 5  # lost workers in a row without a new token
_log = log.get("requests")


class Requests:
    """busy() is called when the first request comes after none were live."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float], settings: Settings,
                 facts: ModelFacts, admission: Admission, workers: WorkerPool, pool: PoolLink, stats: Stats,
                 health: HealthBoard, busy: Callable[[], None]) -> None:
        self._loop, self._clock, self._facts, self._health, self._busy = loop, clock, facts, health, busy
        self._admission, self._workers, self._pool, self._stats = admission, workers, pool, stats
        self._queue_seconds = settings.queue_seconds
        self.queue: RequestQueue[Stream] = RequestQueue(settings.queue_limit, settings.queue_tokens, clock())
        self.live: dict[int, Stream] = {}
        self.draining = False
        self.fruitless_most = FRUITLESS_MOST
        self._relay = Relay(self, settings.max_frame, clock)
        self._starved: set[Stream] = set()
        self._next_key = 1
        self._room_grew = False  # in this step
        self._placing = Placing(self.queue, workers, pool, admission)
        self._pressure = Pressure(workers, clock, partial(self.cancel, finish="exhausted"))
        workers.listener = self
        pool.room_changed, pool.shortage = self._room_changed, self._pressure

    @property
    def running(self) -> int:
        return sum(len(worker.running) for worker in self._workers)

    @property
    def tokens_relayed(self) -> int:
        return self._relay.tokens_relayed

    # ---- what clients ask ------------------------------------------------------------------------------------------

    def generate(self, session: Session, request_id: int, message: Generate) -> None:
        """Refused with InvalidMessage, or answered by TOKENS and DONE or ERROR from now on; so is score."""
        self._submit(session, request_id, message, self._admission.generate)

    def score(self, session: Session, request_id: int, message: Score) -> None:
        self._submit(session, request_id, message, self._admission.score)

    def check(self, session: Session, request_id: int, message: TokenCheck) -> None:
        """Refused, or answered once the pool has said what is cached."""
        self._check_open(session)
        job, slabs = self._admission.check(message, session.peer.uid)

        def answer(cached: int) -> None:
            session.send(TokenCheckReply(prompt_tokens=len(job.tokens) // TOKEN, cached_tokens=cached,
                                         max_tokens=job.max_tokens, slabs=slabs), request_id)
            session.answered()

        session.owed += 1
        self._pool.lookup(job, answer)

    def cancel(self, stream: Stream, finish: str = "abort") -> None:
        """Ends a live stream: at once, or with its last row. finish: abort, deadline, draining or exhausted."""
        if stream.forced is not None:
            return
        stream.forced = finish
        if stream.worker is not None:
            stream.worker.say(ipc.CANCEL, stream.key, "deadline" if finish == "deadline" else "abort")
        else:
            self._end_forced(stream)
            self.pump()

    def end_all(self) -> None:
        """Ends everything live now, whatever the workers do, with DRAINING."""
        for stream in list(self.live.values()):
            self.cancel(stream, "draining")
            if stream.key in self.live:
                self._end_forced(stream)

    def abandon(self, stream: Stream) -> None:
        """The client is gone: nothing is sent any more."""
        stream.session, stream.plain = None, False
        self._starved.discard(stream)
        self.cancel(stream)

    def credit(self, stream: Stream, tokens: int) -> None:
        stream.credit = min(UNLIMITED, stream.credit + tokens)
        self._relay.release(stream)
        if stream.pending:
            return
        self._starved.discard(stream)
        stream.starved_since = None
        if stream.phase is Phase.HELD:
            self._end(stream, stream.finish)
        elif stream.session is not None and not stream.session.pausing:
            self.resume(stream)

    # ---- flow control ----------------------------------------------------------------------------------------------

    def starve(self, stream: Stream) -> None:
        if stream.starved_since is None:
            stream.starved_since = self._clock()
            self._starved.add(stream)

    def _pause_starved(self, since: float) -> None:
        """Takes streams that have been out of credit since then or longer out of their batches."""
        for stream in self._starved:
            if stream.starved_since is not None and stream.starved_since <= since:
                self.pause(stream)

    def pause(self, stream: Stream) -> None:
        """Out of the worker's batch; idempotent, like resume."""
        if stream.worker is not None and not stream.paused:
            stream.paused = True
            stream.worker.say(ipc.PAUSE, stream.key)

    def resume(self, stream: Stream) -> None:
        if stream.worker is not None and stream.paused and stream.starved_since is None:
            stream.paused = False
            stream.worker.say(ipc.RESUME, stream.key)

    # ---- admission -------------------------------------------------------------------------------------------------

    def _submit(self, session: Session, request_id: int, message: Any, admit: Callable[[Any, int], Admitted]) -> None:
        self._check_open(session)
        admitted = admit(message, session.peer.uid)
        now = self._clock()
        owner = (session.peer.uid, message.tenant)
        stream = Stream(self._next_key, request_id, session, admitted.job, owner, message, now)
        if session.credit:
            stream.credit = INITIAL_CREDIT
        if admitted.answer is None:
            self._enqueue(stream, now)
        self._start(stream, session)
        if admitted.answer is not None:
            stream.phase = Phase.HELD
            return self._computed(stream, *admitted.answer)
        self._arm(stream, min(stream.deadline, now + self._queue_seconds), now)
        self.pump()

    def _check_open(self, session: Session) -> None:
        if self.draining:
            raise draining()
        if reason := self._health.failed():
            raise Refused(Code.NOT_READY, f"the model is not being served: {reason}", "not_ready",
                          self.queue.retry_after(0, self._clock()))
        if len(session.streams) >= session.max_requests:
            raise Refused(Code.TOO_MANY_INFLIGHT, f"{len(session.streams)} requests are live on this connection, "
                          f"{session.max_requests} are allowed; wait for one to end", "peer_limit",
                          limit=session.max_requests)

    def _enqueue(self, stream: Stream, now: float) -> None:
        full = self.queue.offer(stream, now)
        if full is not None:
            unit = "requests" if full.bound == "queue_full" else "prompt tokens"
            raise Refused(Code.QUEUE_FULL, f"{full.limit} {unit} may wait; try again in {full.retry_after_ms} ms",
                          full.bound, full.retry_after_ms, full.limit)

    def _start(self, stream: Stream, session: Session) -> None:
        self._next_key += 1
        if not self.live:
            self._busy()
        self.live[stream.key] = session.streams[stream.id] = stream
        session.last_id = stream.id
        self._stats.started(stream.prompt)

    def _arm(self, stream: Stream, when: float, now: float) -> None:
        stream.timer = self._loop.call_later(max(0.0, when - now), self._expire, stream)

    def _expire(self, stream: Stream) -> None:
        """The stream's timer."""
        now = self._clock()
        waits_for_first = stream.phase is Phase.QUEUED and not stream.attempt
        due = min(stream.deadline, stream.arrived + self._queue_seconds) if waits_for_first else stream.deadline
        if now < due:
            self._arm(stream, due, now)
        elif now >= stream.deadline:
            self.cancel(stream, "deadline")
        else:
            self._end(stream, "error", self._waited_too_long(now))
            self.pump()

    def _waited_too_long(self, now: float) -> Refused:
        loaded = any(worker.loaded for worker in self._workers)
        return waited_too_long(self._queue_seconds, loaded, self._workers.best() is not None,
                               self.queue.retry_after(0, now))

    # ---- workers and room in them ----------------------------------------------------------------------------------

    def pump(self) -> None:
        """Assigns from the queue what there is room for."""
        while (placed := self._placing.next()) is not None:
            stream, worker, slabs = placed
            now = self._clock()
            self.queue.take(stream, now)
            stream.assigned_at = stream.assigned_at or now
            stream.attempt += 1
            stream.lost = False
            stream.mark = stream.progress
            worker.assign(stream, slabs)

    def worker_ready(self, worker: Worker) -> None:
        _log.info("worker ready", worker=worker.slot, pid=worker.pid, slabs=worker.slabs, max_seqs=worker.max_seqs)
        self._admission.capacity = Capacity(self._pool.usable or worker.slabs, worker.chunk)
        self._refuse_too_large()
        self.pump()

    def _room_changed(self) -> None:
        """As told by the pool."""
        capacity, usable = self._admission.capacity, self._pool.usable
        if capacity is not None and usable is not None and usable != capacity.slabs:
            self._admission.capacity = replace(capacity, slabs=usable)
            self._refuse_too_large()
        self.pump()

    def _refuse_too_large(self) -> None:
        """Ends what was queued before it was known that it will never fit."""
        capacity = self._admission.capacity
        assert capacity is not None  # it has just become known
        for stream in list(self.queue):
            if (need := self._admission.slabs(stream.length)) > capacity.slabs:
                self._end(stream, "error", never_fits(need, capacity.slabs))

    def step(self, worker: Worker, number: int, rows: list[Any]) -> None:
        self._room_grew = False
        self._relay.step(worker, number, rows)
        if self._room_grew:
            self.pump()

    def prefilled(self, stream: Stream) -> None:
        """The stream has the slabs that were promised to it."""
        if stream.worker is not None:
            stream.worker.settle(stream)
        self._room_grew = True

    def tick(self, now: float, starved_since: float) -> None:
        """Several times a second. starved_since: who is out of credit since then or longer leaves the batch."""
        self._pause_starved(starved_since)
        self._pressure.look(now)

    def worker_lost(self, worker: Worker, streams: list[Stream]) -> None:
        """Their streams wait in front of all others for any worker, and go on where they were."""
        moving = [stream for stream in streams if not self._ends_here(stream)]
        if moving:
            _log.warning("worker lost, its requests move", worker=worker.slot, pid=worker.pid, requests=len(moving))
            self._stats.add("request_takeovers_total", len(moving))
        for stream in moving:
            stream.phase = Phase.QUEUED
        self.queue.put_back(moving)
        self.pump()

    def _ends_here(self, stream: Stream) -> bool:
        """Ends a stream whose worker is lost, if no other has to go on with it. Else makes its job the rest."""
        self._pressure.left(stream)
        stream.lost = True
        stream.fruitless = 0 if stream.progress > stream.mark else stream.fruitless + 1
        if stream.forced is None and stream.fruitless >= self.fruitless_most:
            stream.phase = Phase.HELD
            self._end(stream, "error", worker_lost(stream.fruitless))
            return True
        return not self._is_to_go_on(stream)

    def _is_to_go_on(self, stream: Stream) -> bool:
        """Whether a stream that its worker has no more has something left to compute, which its job is then. If not,
        it ends."""
        stream.phase = Phase.HELD
        stream.continue_elsewhere()
        if stream.forced is not None:
            self._end_forced(stream)
        elif (answer := foregone(stream.job)) is not None:
            self._computed(stream, *answer)
        else:
            return True
        return False

    def _preempted(self, stream: Stream) -> None:
        """It has given way, and waits at its place by age until there is room."""
        stream.preemptions += 1
        self._stats.add("num_preemptions_total")
        if self._is_to_go_on(stream):
            stream.phase = Phase.QUEUED
            self.queue.put_again(stream)

    def last_row(self, stream: Stream, finish: str, match: Match, error: tuple[int, str] | None) -> None:
        """The worker has relayed all it will of a stream. ValueError if it makes no sense: then the worker must go."""
        fault = None if error is None else InvalidMessage(Code(error[0]), error[1])
        if finish not in (*FINISHED, "preempted"):
            raise ValueError(f"finish {finish!r}")
        if stream.worker is not None:
            stream.worker.release(stream)
        self._room_grew = True
        self._pressure.left(stream)
        if finish == "preempted":
            return self._preempted(stream)
        stream.phase = Phase.HELD
        if fault is not None:
            self._end(stream, "error", fault)
        elif stream.forced is not None and finish in ("abort", "deadline"):
            self._end_forced(stream)
        else:
            self._computed(stream, finish, match)

    def _computed(self, stream: Stream, finish: str, match: Match) -> None:
        """Nothing is left to compute, perhaps something to send."""
        stream.match = match
        if stream.pending:
            stream.finish = finish
        else:
            self._end(stream, finish)

    # ---- ends ------------------------------------------------------------------------------------------------------

    def _end_forced(self, stream: Stream) -> None:
        """The end that was asked for, of a stream that no worker has."""
        waiting = stream.phase is Phase.QUEUED
        if stream.forced == "draining":
            self._end(stream, "error", draining())
        elif stream.forced == "exhausted":
            self._end(stream, "error", kv_exhausted(self.queue.retry_after(stream.cost, self._clock())))
        elif stream.forced == "deadline" and waiting and stream.lost:
            self._end(stream, "error", worker_lost(0))
        elif stream.forced == "deadline" and not stream.delivered:
            self._end(stream, "error", InvalidMessage(Code.DEADLINE_EXCEEDED, "the deadline passed before the first "
                                                      "token"))
        else:
            self._end(stream, stream.forced or "abort")

    def _end(self, stream: Stream, finish: str, error: InvalidMessage | None = None) -> None:
        """The one place where a live stream ends. finish: a finish reason, or "error"."""
        now = self._clock()
        self._forget(stream)
        self.queue.share.charge(stream.owner, len(stream.tokens) // TOKEN - stream.base)
        self._stats.finished(finish, error)
        usage, times = stream.usage(), stream.times(now)
        log_end(stream, finish, error, usage, times)
        if (session := stream.session) is None:
            return
        del session.streams[stream.id]
        if error is None:
            session.send(stream.done(finish, self._facts, usage, times), stream.id)
        else:
            session.send(failure(stream, error, usage), stream.id)
        session.request_ended()

    def _forget(self, stream: Stream) -> None:
        if stream.phase is Phase.QUEUED:
            self.queue.remove(stream)
        elif stream.worker is not None:
            stream.worker.release(stream)
            self._pressure.left(stream)
        stream.phase = Phase.ENDED
        if stream.attempt:  # its worker may have died before it could say so to the pool
            self._pool.drop(stream.key)
        if stream.timer is not None:
            stream.timer.cancel()
        self._starved.discard(stream)
        del self.live[stream.key]
