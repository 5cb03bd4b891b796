"""Which request goes to which worker next: one with a free place, while the KV slabs that all share last.

A request is promised the slabs for what it has to compute first and one for output. The promise counts until its first
token is there: by then it has taken them, and the pool's numbers say so. What it grows by later is not promised: when
that runs out, somebody is preempted (pressure.py).
"""

from __future__ import annotations

from collections.abc import Callable

from .admission import Admission
from .pool_link import PoolLink
from .preempt import fits
from .queue import RequestQueue
from .streams import Stream
from .workers import Worker, WorkerPool


class Placing:
    def __init__(self, queue: RequestQueue[Stream], workers: WorkerPool, pool: PoolLink, admission: Admission) -> None:
        self._queue, self._workers, self._pool, self._admission = queue, workers, pool, admission

    def next(self) -> tuple[Stream, Worker, int] | None:
        """A request that waits, its worker and the slabs to promise it; None if nobody can go now."""
        worker = self._workers.best() if len(self._queue) else None
        if worker is None:
            return None
        stream = self._queue.choose(self._test())
        return None if stream is None else (stream, worker, self.need(stream))

    def need(self, stream: Stream) -> int:
        return self._admission.slabs(min(stream.length, stream.cost + self._admission.slab_tokens))

    def _test(self) -> Callable[[Stream], bool]:
        """Whether there are slabs for a request. As long as the pool has said nothing there are."""
        if self._pool.available is None:
            return lambda _: True
        running = promised = 0
        for worker in self._workers:
            running += len(worker.running)
            promised += worker.promised
        available = self._pool.available - promised
        return lambda stream: fits(self.need(stream), stream.preemptions, running, available)
