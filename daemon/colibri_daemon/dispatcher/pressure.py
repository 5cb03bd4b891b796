"""What is done when the KV cache is full. The pool has then evicted all that was only cached; requests are preempted,
one at a time, until it says that nobody is short any more; if there is nobody to preempt and the one that is left
stands still, it ends with KV_EXHAUSTED. preempt.py says who.
"""

from __future__ import annotations

from collections.abc import Callable

from ..common import ipc, log
from .pool_link import PoolLink
from .preempt import victim
from .streams import Leaving, Stream
from .workers import Worker, WorkerId

CALM_SECONDS = 0.02  # for the pool to see what a victim gave back
STILL_SECONDS = 3.0  # without a step of a worker that is short, though there is nobody to preempt: more than a lost
#                      worker's slabs take to come back (losses.py, HOLD_SECONDS)
STILL_STEPS = 10  # or so many times its longest step, if that is more
_log = log.get("pressure")


class Pressure:
    """Of one pool. short: slabs that workers wait for. end(stream) is called for those that cannot go on."""

    def __init__(self, pool: PoolLink, clock: Callable[[], float], end: Callable[[Stream], None]) -> None:
        self.short: dict[WorkerId, int] = {}
        self._pool, self._clock, self._end = pool, clock, end
        self._leaving: Stream | None = None  # was told to give way
        self._calm_until = 0.0
        self._still: dict[Worker, tuple[int, float]] = {}  # steps made, and since when no more

    def rise(self, worker: WorkerId, missing: int) -> None:
        if missing < self.short.get(worker, 0):
            self._calm_until = 0.0  # it got some, and not enough
        self.short[worker] = missing
        self.look(self._clock())

    def fall(self, worker: WorkerId) -> None:
        self.short.pop(worker, None)
        self._still = {other: still for other, still in self._still.items() if other.id != worker}

    def reset(self) -> None:
        """There is no pool to say who is short."""
        self.short.clear()
        self._still.clear()

    def left(self, stream: Stream) -> None:
        """The stream's worker has it no more, for whatever reason."""
        if stream is self._leaving:
            self._leaving = None
            self._calm_until = self._clock() + CALM_SECONDS

    def look(self, now: float) -> None:
        """Does what there is to do; called when somebody gets short and several times a second."""
        if not self.short or self._leaving is not None or now < self._calm_until:
            return
        running = [stream for worker in self._pool.workers() for stream in worker.running.values()]
        chosen = victim([stream for stream in running if stream.forced is None and stream.leaving is None])
        if chosen is None:
            return self._judge(now)
        self._still.clear()
        self._ask(chosen)

    def _ask(self, stream: Stream) -> None:
        """To give way."""
        worker = stream.worker
        assert worker is not None  # it runs
        self._leaving, stream.leaving = stream, Leaving.SLABS
        _log.info("request is preempted", id=stream.id, connection=stream.connection, worker=worker.slot,
                  computed=stream.prompt + stream.progress, before=stream.preemptions, missing=sum(self.short.values()))
        worker.say(ipc.PREEMPT, stream.key)

    def _judge(self, now: float) -> None:
        """Whether those that are short stand still."""
        for worker in [worker for worker in self._pool.workers() if worker.id in self.short and worker.running]:
            steps, since = self._still.get(worker, (-1, now))
            if steps != worker.steps:
                self._still[worker] = worker.steps, now
            elif now - since >= max(STILL_SECONDS, STILL_STEPS * worker.stall_ms / 1000):
                for stream in list(worker.running.values()):
                    self._end(stream)
