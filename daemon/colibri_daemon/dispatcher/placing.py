"""Which request goes to which worker next: one with a free place, while the KV slabs that all share last.

A request is promised the slabs for what it has to compute first and one for output. The promise counts until its first
token is there: by then it has taken them, and the pool's numbers say so. What it grows by later is not promised: when
that runs out, somebody is preempted (pressure.py).

A place that was asked back counts as free: a worker handles PREEMPT before the ASSIGN that follows it on the link, so
whoever comes instead loses no step. A worker that is kept for suspects (poison.py) gets them one by one, nobody else;
one that stands still (stopped, or hung and not replaced yet) gets nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .admission import Admission
from .places import giver
from .poison import kept_apart
from .pool_link import PoolLink
from .preempt import fits
from .queue import RequestQueue
from .streams import Stream
from .workers import Worker, WorkerPool

CALM_SECONDS = 0.05  # for the pool to tell of the slabs that somebody gave back


@dataclass(frozen=True)
class Host:
    """A loaded worker. load, room: requests in it and free places, without those that are asked to leave."""

    worker: Worker
    load: int
    room: int
    tries: bool  # one of its requests is a suspect

    @classmethod
    def of(cls, worker: Worker) -> Host:
        leaving = sum(stream.leaving is not None for stream in worker.running.values())
        tries = any(stream.struck_at is not None for stream in worker.running.values())
        return cls(worker, len(worker.running) - leaving, worker.room + leaving if worker.listens else 0, tries)


class Placing:
    def __init__(self, queue: RequestQueue[Stream], workers: WorkerPool, pool: PoolLink, admission: Admission) -> None:
        self._queue, self._workers, self._pool, self._admission = queue, workers, pool, admission
        self._open: list[Host] = []  # to all, as next() saw them
        self._calm_until = 0.0

    def next(self) -> tuple[Stream, Worker, int] | None:
        """A request that waits, its worker and the slabs to promise it; None if nobody can go now."""
        if not len(self._queue):
            return None
        hosts = [Host.of(worker) for worker in self._workers if worker.loaded]
        kept = kept_apart(hosts, self._queue.apart)
        self._open = [host for host in hosts if host not in kept]
        self._queue.held = Counter(stream.owner for worker in self._workers for stream in worker.running.values()
                                   if stream.leaving is None)  # fmt: skip
        return self._place(self._queue.choose_apart, [host for host in kept if not host.load]) or self._place(
            self._queue.choose, self._open)  # fmt: skip

    def _place(self, choose: Callable[[Callable[[Stream], bool]], Stream | None],
               hosts: list[Host]) -> tuple[Stream, Worker, int] | None:
        best = max(hosts, key=lambda host: host.room, default=None)
        if best is None or best.room <= 0 or (stream := choose(self._test())) is None:
            return None
        return stream, best.worker, self.need(stream)

    def give_way(self, now: float) -> Stream | None:
        """After next() had nobody: the running request that gives up its place to an owner with fewer, if one waits who
        is owed a place. When it is leaving next() may have somebody."""
        if not self._queue.is_owed_a_place or now < self._calm_until:
            return None
        running = [stream for host in self._open for stream in host.worker.running.values()]
        if any(host.room > 0 for host in self._open):  # so it is slabs that are missing
            if any(stream.leaving is not None for stream in running):
                return None
            self._calm_until = now + CALM_SECONDS
        return giver([stream for stream in running if stream.leaving is None and stream.forced is None],
                     self._queue.held)  # fmt: skip

    def need(self, stream: Stream) -> int:
        return self._admission.slabs(min(stream.length, stream.cost + self._admission.slab_tokens), stream.job)

    def _test(self) -> Callable[[Stream], bool]:
        """Whether there are slabs for a request. As long as the pool has said nothing there are."""
        if self._pool.available is None:
            return lambda _: True
        running = promised = 0
        for worker in self._pool.workers():
            running += len(worker.running)
            promised += worker.promised
        available = self._pool.available - promised
        return lambda stream: fits(self.need(stream), stream.preemptions, running, available)
