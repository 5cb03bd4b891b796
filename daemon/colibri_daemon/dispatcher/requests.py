"""The life of every request: admitted, queued, assigned, taken over from a lost worker, ended exactly once.

Nothing here waits. Each live request has one timer: until it is assigned for the queue limit or its deadline, then for
its deadline. How tokens travel is relay.py's business, in which order requests go queue.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from colibri_protocol.codec import error_message
from colibri_protocol.errors import Code, InvalidMessage
from colibri_protocol.limits import INITIAL_CREDIT
from colibri_protocol.messages import Error, Generate, Score, Times, TokenCheck, TokenCheckReply, Usage

from ..common import ipc, log
from ..common.facts import ModelFacts
from ..common.settings import Settings
from .admission import Admission, Admitted, Capacity, Refused, foregone, never_fits
from .health import HealthBoard
from .queue import RequestQueue
from .relay import Relay
from .stats import FINISHED, Stats
from .streams import TOKEN, UNLIMITED, Match, Phase, Stream
from .workers import Worker, WorkerPool

if TYPE_CHECKING:
    from .session import Session

FRUITLESS_MOST = 5  # lost workers in a row without a new token
WAITING_PER_PLACE = 4  # queue_requests 0: this many for each place in a batch
_log = log.get("requests")


class Requests:
    """busy() is called when the first request comes after none were live."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float], settings: Settings,
                 facts: ModelFacts, admission: Admission, pool: WorkerPool, stats: Stats, health: HealthBoard,
                 busy: Callable[[], None]) -> None:
        self._loop, self._clock, self._facts, self._health, self._busy = loop, clock, facts, health, busy
        self._admission, self._pool, self._stats = admission, pool, stats
        self._queue_seconds = settings.queue_seconds
        places = settings.workers * settings.max_seqs
        self.queue: RequestQueue[Stream] = RequestQueue(settings.queue_requests or WAITING_PER_PLACE * places,
                                                        settings.queue_tokens, clock())
        self.live: dict[int, Stream] = {}
        self.draining = False
        self.fruitless_most = FRUITLESS_MOST
        self._relay = Relay(self, settings.max_frame, clock)
        self._starved: set[Stream] = set()
        self._next_key = 1
        pool.listener = self

    @property
    def running(self) -> int:
        return sum(len(worker.running) for worker in self._pool)

    @property
    def tokens_relayed(self) -> int:
        return self._relay.tokens_relayed

    # ---- what clients ask ------------------------------------------------------------------------------------------

    def generate(self, session: Session, request_id: int, message: Generate) -> None:
        """Refused with InvalidMessage, or answered by TOKENS and DONE or ERROR from now on; so is score."""
        self._submit(session, request_id, message, self._admission.generate)

    def score(self, session: Session, request_id: int, message: Score) -> None:
        self._submit(session, request_id, message, self._admission.score)

    def check(self, session: Session, message: TokenCheck) -> TokenCheckReply:
        self._check_open(session)
        max_tokens, slabs = self._admission.check(message, session.peer.uid)
        return TokenCheckReply(prompt_tokens=len(message.tokens) // TOKEN, max_tokens=max_tokens, slabs=slabs)

    def cancel(self, stream: Stream, finish: str = "abort") -> None:
        """Ends a live stream: at once, or with its last row. finish: abort, deadline or draining."""
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

    def pause_starved(self, since: float) -> None:
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
        retry = self.queue.retry_after(0, now)
        if any(worker.loaded for worker in self._pool):
            return Refused(Code.QUEUE_FULL, f"no worker was free within {self._queue_seconds:g} s", "queue_full", retry)
        return Refused(Code.NOT_READY, f"no worker was ready within {self._queue_seconds:g} s", "not_ready", retry)

    # ---- workers ---------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Assigns from the queue while its head finds a worker."""
        while (stream := self.queue.head()) is not None:
            worker = self._pool.best(partial(self._admission.slabs, stream.length))
            if worker is not None:
                self._assign(stream, worker)
            elif not self._refuse_too_large(stream):
                return

    def _refuse_too_large(self, stream: Stream) -> bool:
        """Ends a request that was queued before a worker had told its size, and that will never fit."""
        capacity = self._admission.capacity
        if capacity is None or (need := self._admission.slabs(stream.length, capacity.chunk)) <= capacity.slabs:
            return False
        self._end(stream, "error", never_fits(need, capacity.slabs))
        return True

    def _assign(self, stream: Stream, worker: Worker) -> None:
        now = self._clock()
        self.queue.take(stream, now)
        stream.assigned_at = stream.assigned_at or now
        stream.attempt += 1
        stream.mark = stream.progress
        worker.assign(stream, self._admission.slabs(stream.length, worker.chunk))

    def worker_ready(self, worker: Worker) -> None:
        self._admission.capacity = Capacity(worker.slabs, worker.chunk)
        _log.info("worker ready", worker=worker.slot, pid=worker.pid, slabs=worker.slabs, max_seqs=worker.max_seqs)
        self.pump()

    def step(self, worker: Worker, number: int, rows: list[Any]) -> None:
        self._relay.step(worker, number, rows)
        if len(self.queue):
            self.pump()

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
        stream.phase = Phase.HELD
        stream.fruitless = 0 if stream.progress > stream.mark else stream.fruitless + 1
        stream.continue_elsewhere()
        if stream.forced is not None:
            self._end_forced(stream)
        elif stream.fruitless >= self.fruitless_most:
            self._end(stream, "error", InvalidMessage(Code.WORKER_LOST, f"{stream.fruitless} workers in a row were "
                                                      "lost before they made a token of it"))
        elif (answer := foregone(stream.job)) is not None:
            self._computed(stream, *answer)
        else:
            return False
        return True

    def last_row(self, stream: Stream, finish: str, match: Match, error: tuple[int, str] | None) -> None:
        """The worker has relayed all it will of a stream. ValueError if it makes no sense: then the worker must go."""
        fault = None if error is None else InvalidMessage(Code(error[0]), error[1])
        if finish not in FINISHED:
            raise ValueError(f"finish {finish!r}")
        if stream.worker is not None:
            stream.worker.release(stream)
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
        elif stream.forced == "deadline" and waiting and stream.attempt:
            self._end(stream, "error", InvalidMessage(Code.WORKER_LOST, "no other worker could take the request over "
                                                      "within its deadline"))
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
        self._stats.finished(finish, error, stream)
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
        stream.phase = Phase.ENDED
        if stream.timer is not None:
            stream.timer.cancel()
        self._starved.discard(stream)
        del self.live[stream.key]


def draining() -> Refused:
    return Refused(Code.DRAINING, "the daemon is stopping; send it to another instance", "draining")


def failure(stream: Stream, error: InvalidMessage, usage: Usage) -> Error:
    """The ERROR that ends a stream that was live."""
    sent = stream.sent - stream.base
    message = error_message(error, sent, getattr(error, "retry_after_ms", None))
    return replace(message, usage=usage) if stream.attempt else message


def log_end(stream: Stream, finish: str, error: InvalidMessage | None, usage: Usage, times: Times) -> None:
    """One line per request, without its tokens."""
    optional = {"code": error and error.code.name, "tenant": stream.owner[1], "trace": stream.trace}
    _log.info("request ended", id=stream.id, connection=stream.connection, uid=stream.owner[0], prompt=usage.prompt,
              cached=usage.cached, generated=usage.generated, finish=finish, queue_ms=times.queue,
              prefill_ms=times.prefill, decode_ms=times.decode, worker=stream.slot, attempt=stream.attempt,
              **{name: value for name, value in optional.items() if value is not None})  # fmt: skip
