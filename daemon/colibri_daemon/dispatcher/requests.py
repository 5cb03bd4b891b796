"""The life of every request: admitted, queued, assigned, preempted, taken over from a lost worker, ended exactly once.

Nothing here waits. Each live request has one timer: until it is assigned for the queue limit or its deadline, then for
its deadline; a worker that was told to end it has a while for that. How tokens travel is relay.py's business, in which
order requests go queue.py's, when and whereto assigning.py's, who gives way pressure.py's, how they get from one worker
to another moves.py's, and who is refused before all that gate.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from colibri_protocol.errors import Code, InvalidMessage
from colibri_protocol.limits import INITIAL_CREDIT
from colibri_protocol.messages import Generate, Score, TokenCheck, TokenCheckReply

from ..common import ipc, log
from ..common.metrics import FINISHED
from .admission import Admitted, Refused
from .assigning import Assigning
from .endings import draining, failure, kv_exhausted, log_end, no_answer, nobody_took_over, waited_too_long
from .gate import Gate
from .generation import Generation, Generations
from .health import HealthBoard
from .moves import Moves
from .poison import is_cleared
from .pool_link import PoolLink
from .pressure import Pressure
from .queue import RequestQueue
from .relay import Relay
from .stats import Stats
from .streams import TOKEN, UNLIMITED, Match, Phase, Stream
from .workers import Worker

if TYPE_CHECKING:
    from .session import Session

ANSWER_SECONDS, ANSWER_STEPS = 2.0, 10  # for the last row of a request that was to end: at least, and in longest steps
_log = log.get("requests")


class Requests:
    """busy() is called when the first request comes after none were live."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float], generations: Generations,
                 stats: Stats, health: HealthBoard, busy: Callable[[], None]) -> None:
        self._loop, self._clock, self._busy = loop, clock, busy
        self._generations, self._stats = generations, stats
        self.live: dict[int, Stream] = {}
        self._gate = Gate(health)
        self._relay = Relay(self, clock, stats)
        self._assigning = Assigning(generations, clock, lambda stream, error: self.end(stream, "error", error))
        self.moves = Moves(loop, clock, generations, stats, self, self._left, self._gate.poisoned)
        self._starved: set[Stream] = set()
        self._next_key = 1
        self._room_grew = False  # in this step
        self._pressures: dict[PoolLink, Pressure] = {}
        generations.made = self._made
        for generation in generations:
            self._made(generation)

    def _made(self, generation: Generation) -> None:
        generation.workers.listener, pool = self, generation.pool
        if pool not in self._pressures:
            self._pressures[pool] = Pressure(pool, self._clock, partial(self.cancel, finish="exhausted"))
            pool.room_changed, pool.shortage = partial(self._assigning.room_changed, pool), self._pressures[pool]

    @property
    def draining(self) -> bool:
        """No new requests are taken."""
        return self._gate.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._gate.draining = value

    def forget(self, pool: PoolLink) -> None:
        """Of a generation that is gone; another one may use it."""
        if not pool.users:
            self._pressures.pop(pool, None)

    @property
    def queue(self) -> RequestQueue[Stream]:
        """Of the generation that serves."""
        return self._generations.serving.queue

    @property
    def waiting(self) -> int:
        return sum(len(generation.queue) for generation in self._generations)

    @property
    def waiting_tokens(self) -> int:
        return sum(generation.queue.tokens for generation in self._generations)

    @property
    def running(self) -> int:
        return sum(len(worker.running) for worker in self._generations.workers())

    # ---- what clients ask ------------------------------------------------------------------------------------------

    def generate(self, session: Session, request_id: int, message: Generate) -> None:
        """Refused with InvalidMessage, or answered by TOKENS and DONE or ERROR from now on; so is score."""
        generation = self._generations.to_resume(message.resume and message.resume.receipt)
        self._submit(session, request_id, message, generation, generation.admission.generate)

    def score(self, session: Session, request_id: int, message: Score) -> None:
        generation = self._generations.serving
        self._submit(session, request_id, message, generation, generation.admission.score)

    def check(self, session: Session, request_id: int, message: TokenCheck) -> None:
        """Refused, or answered once the pool has said what is cached."""
        generation = self._generations.serving
        self._gate.check(session, (session.peer.uid, message.tenant), generation, self._clock())
        job, slabs = generation.admission.check(message, session.peer.uid)

        def answer(cached: int) -> None:
            session.send(TokenCheckReply(prompt_tokens=len(job.tokens) // TOKEN, cached_tokens=cached,
                                         max_tokens=job.max_tokens, slabs=slabs), request_id)
            session.answered()

        session.owed += 1
        generation.pool.lookup(job, answer)

    def cancel(self, stream: Stream, finish: str = "abort") -> None:
        """Ends a live stream: at once, or with its last row. finish: abort, deadline, draining or exhausted."""
        if stream.forced is not None:
            return
        stream.forced = finish
        if finish == "abort":
            stream.cancelled = self._clock(), stream.doing
        if stream.worker is not None:
            stream.worker.say(ipc.CANCEL, stream.key, "deadline" if finish == "deadline" else "abort")
            self._arm(stream, max(ANSWER_SECONDS, ANSWER_STEPS * stream.worker.stall_ms / 1000))
        elif finish != "deadline" or stream.lost != "unknown":  # else it ends when that is known
            self.end_forced(stream)
            self.pump()

    def end_all(self) -> None:
        """Ends everything live now, whatever the workers do, with DRAINING."""
        for stream in list(self.live.values()):
            self.cancel(stream, "draining")
            if stream.key in self.live:
                self.end_forced(stream)

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
            self.end(stream, stream.finish)
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

    def _submit(self, session: Session, request_id: int, message: Any, generation: Generation,
                admit: Callable[[Any, int], Admitted]) -> None:
        now, owner = self._clock(), (session.peer.uid, message.tenant)
        self._gate.check(session, owner, generation, now)
        admitted = admit(message, session.peer.uid)
        stream = Stream(self._next_key, request_id, session, generation, admitted.job, owner, message, now)
        self._gate.check_job(owner, stream.job, stream.asked_seed, now)
        if session.credit:
            stream.credit = INITIAL_CREDIT
        if admitted.answer is None:
            self._enqueue(stream, now)
        self._start(stream, session)
        if admitted.answer is not None:
            stream.phase = Phase.HELD
            return self.computed(stream, *admitted.answer)
        self._arm(stream, min(stream.deadline - now, generation.settings.queue_seconds))
        self.pump()

    def _enqueue(self, stream: Stream, now: float) -> None:
        full = stream.generation.queue.offer(stream, now)
        if full is not None:
            unit = "requests" if full.bound == "queue_full" else "prompt tokens"
            raise Refused(Code.QUEUE_FULL, f"{full.limit} {unit} may wait; try again in {full.retry_after_ms} ms",
                          full.bound, full.retry_after_ms, full.limit)

    def _start(self, stream: Stream, session: Session) -> None:
        self._next_key += 1
        if not self.live:
            self._busy()
        self.live[stream.key] = session.streams[stream.id] = stream.generation.streams[stream.key] = stream
        session.last_id = stream.id
        self._gate.entered(stream.owner)
        self._stats.started(stream.prompt)

    def _arm(self, stream: Stream, seconds: float) -> None:
        if stream.timer is not None:
            stream.timer.cancel()
        stream.timer = self._loop.call_later(max(0.0, seconds), self._expire, stream)

    def _expire(self, stream: Stream) -> None:
        """The stream's timer."""
        if stream.forced is not None:
            return self._unanswered(stream)
        now = self._clock()
        waits_for_first = stream.phase is Phase.QUEUED and not stream.attempt
        patience = stream.generation.settings.queue_seconds if waits_for_first else float("inf")
        due = min(stream.deadline, stream.arrived + patience)
        if now < due:
            self._arm(stream, due - now)
        elif now >= stream.deadline:
            self.cancel(stream, "deadline")
        else:
            self.end(stream, "error", _waited_too_long(stream.generation, now))
            self.pump()

    def _unanswered(self, stream: Stream) -> None:
        """Its worker was told to end it, and has not. What it may say yet is of an unknown key then."""
        _log.warning("a worker does not answer", worker=stream.slot, id=stream.id, connection=stream.connection)
        if stream.forced == "deadline":
            self.end(stream, "error", no_answer())
        else:
            self.end_forced(stream)
        self.pump()

    # ---- workers and room in them ----------------------------------------------------------------------------------

    def pump(self) -> None:
        self._assigning.pump()

    def worker_ready(self, worker: Worker) -> None:
        self._assigning.worker_ready(worker)
        self.moves.spread(worker)

    def step(self, worker: Worker, number: int, rows: list[Any]) -> None:
        self._room_grew = False
        self._relay.step(worker, number, rows)
        if self._room_grew:
            self.pump()

    def worker_lost(self, worker: Worker, streams: list[Stream]) -> None:
        self.moves.worker_lost(worker, streams)

    def prefilled(self, stream: Stream) -> None:
        """The stream has the slabs that were promised to it."""
        if stream.worker is not None:
            stream.worker.settle(stream)
        self._room_grew = True

    def tried(self, stream: Stream) -> None:
        """A suspect has got on. When it is cleared it makes room for the next one."""
        if stream.struck_at is None or not is_cleared(stream.progress, stream.struck_at):
            return
        stream.struck_at, self._room_grew = None, True
        _log.info("request is cleared", id=stream.id, connection=stream.connection, progress=stream.progress)
        if stream.generation.queue.apart and stream.worker is not None and stream.leaving is None:
            self._assigning.ask_back(stream)

    def tick(self, now: float, starved_since: float) -> None:
        """Several times a second. starved_since: who is out of credit since then or longer leaves the batch."""
        self._pause_starved(starved_since)
        for pressure in self._pressures.values():
            pressure.look(now)
        for worker in self._generations.workers():
            for stream in worker.running.values():
                self._charge(stream)
        if self.waiting:
            self.pump()  # for who waits a little before somebody gives way

    def _charge(self, stream: Stream) -> None:
        """Its owner for what it has been given since the last time."""
        count = len(stream.tokens) // TOKEN
        if count > stream.charged:
            stream.generation.queue.share.charge(stream.owner, count - stream.charged)
            stream.charged = count

    def last_row(self, stream: Stream, finish: str, match: Match, error: tuple[int, str] | None) -> None:
        """The worker has relayed all it will of a stream. ValueError if it makes no sense: then the worker must go."""
        fault = None if error is None else InvalidMessage(Code(error[0]), error[1])
        if finish not in (*FINISHED, "preempted"):
            raise ValueError(f"finish {finish!r}")
        if stream.worker is not None:
            stream.worker.release(stream)
        self._room_grew = True
        self._left(stream)
        if finish == "preempted":
            return self.moves.preempted(stream)
        stream.phase = Phase.HELD
        if fault is not None:
            self.end(stream, "error", fault)
        elif stream.forced is not None and finish in ("abort", "deadline"):
            self.end_forced(stream)
        else:
            self.computed(stream, finish, match)

    def computed(self, stream: Stream, finish: str, match: Match) -> None:
        """Nothing is left to compute, perhaps something to send."""
        stream.match = match
        if not stream.pending:
            self.end(stream, finish)
        elif stream.forced is not None:
            self.end_forced(stream)
        else:
            stream.finish = finish

    # ---- ends ------------------------------------------------------------------------------------------------------

    def end_forced(self, stream: Stream) -> None:
        """The end that was asked for, of a stream that no worker has."""
        waiting = stream.phase in (Phase.QUEUED, Phase.LOST)
        if stream.forced == "draining":
            self.end(stream, "error", draining())
        elif stream.forced == "exhausted":
            self.end(stream, "error", kv_exhausted(self.queue.retry_after(stream.cost, self._clock())))
        elif stream.forced == "deadline" and waiting and stream.lost:
            self.end(stream, "error", nobody_took_over(stream.lost))
        elif stream.forced == "deadline" and not stream.delivered:
            self.end(stream, "error", InvalidMessage(Code.DEADLINE_EXCEEDED, "the deadline passed before the first "
                                                      "token"))
        else:
            self.end(stream, stream.forced or "abort")

    def end(self, stream: Stream, finish: str, error: InvalidMessage | None = None) -> None:
        """The one place where a live stream ends. finish: a finish reason, or "error"."""
        now = self._clock()
        self._forget(stream)
        self._charge(stream)
        self._gate.left(stream.owner)
        self._stats.finished(finish, error)
        usage, times = stream.usage(), stream.times(now)
        self._stats.ended(stream, usage, now)
        log_end(stream, finish, error, usage, times)
        if (session := stream.session) is None:
            return
        del session.streams[stream.id]
        if error is None:
            session.send(stream.done(finish, usage, times), stream.id)
        else:
            session.send(failure(stream, error, usage), stream.id)
        session.request_ended()

    def _forget(self, stream: Stream) -> None:
        generation = stream.generation
        if stream.phase is Phase.QUEUED:
            generation.queue.remove(stream)
        elif stream.worker is not None:
            stream.worker.release(stream)
            self._left(stream)
        stream.phase = Phase.ENDED
        if stream.attempt:  # its worker may have died before it could say so to the pool
            generation.pool.drop(stream.key)
        if stream.timer is not None:
            stream.timer.cancel()
        self._starved.discard(stream)
        del self.live[stream.key], generation.streams[stream.key]

    def _left(self, stream: Stream) -> None:
        self._pressures[stream.generation.pool].left(stream)


def _waited_too_long(generation: Generation, now: float) -> Refused:
    loaded = any(worker.loaded for worker in generation.workers)
    return waited_too_long(generation.settings.queue_seconds, loaded, generation.workers.best() is not None,
                           generation.queue.retry_after(0, now))
