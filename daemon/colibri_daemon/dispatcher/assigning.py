"""From the queues to the workers, whenever somebody comes, room grows or a worker is there: placing.py says who, this
does it, and asks back the places that others are owed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from colibri_protocol.errors import InvalidMessage

from ..common import ipc, log
from .admission import never_fits
from .generation import Generation, Generations
from .pool_link import PoolLink
from .streams import Leaving, Stream
from .workers import Worker

LEAST_STALL = 0.001  # seconds
_log = log.get("requests")


class Assigning:
    """refuse(stream, error) ends one that waits."""

    def __init__(self, generations: Generations, clock: Callable[[], float],
                 refuse: Callable[[Stream, InvalidMessage], None]) -> None:
        self._generations, self._clock, self._refuse = generations, clock, refuse

    def pump(self) -> None:
        """Assigns what there is room for."""
        for generation in self._generations:
            while self._assign_one(generation) or self._ask_back_one(generation):
                pass

    def _assign_one(self, generation: Generation) -> bool:
        if (placed := generation.placing.next()) is None:
            return False
        stream, worker, slabs = placed
        now = self._clock()
        generation.queue.take(stream, now)
        stream.assigned_at = stream.assigned_at or now
        stream.attempt += 1
        stream.lost, stream.leaving = "", None
        stream.mark = stream.progress
        worker.assign(stream, slabs)
        return True

    def _ask_back_one(self, generation: Generation) -> bool:
        if (stream := generation.placing.give_way(self._clock())) is None:
            return False
        _log.info("request gives up its place", id=stream.id, connection=stream.connection, uid=stream.owner[0],
                  worker=stream.slot, computed=stream.prompt + stream.progress, before=stream.displaced)
        self.ask_back(stream)
        return True

    def ask_back(self, stream: Stream) -> None:
        """The place of a running stream, which goes on later."""
        assert stream.worker is not None  # it runs
        stream.leaving = Leaving.PLACE
        stream.worker.say(ipc.PREEMPT, stream.key)

    def worker_ready(self, worker: Worker) -> None:
        _log.info("worker ready", worker=worker.slot, worker_pid=worker.pid, slabs=worker.slabs,
                  max_seqs=worker.max_seqs)
        for generation in self._generations:
            if worker in generation.workers:
                generation.learn_capacity(worker)
                generation.queue.expect(sum(w.chunk / max(w.stall_ms / 1000, LEAST_STALL) for w in generation.workers))
                self._refuse_too_large(generation)
        self.pump()

    def room_changed(self, pool: PoolLink) -> None:
        """As told by the pool."""
        for generation in self._generations:
            capacity, usable = generation.admission.capacity, pool.usable
            if generation.pool is pool and capacity is not None and usable is not None and usable != capacity.slabs:
                generation.admission.capacity = replace(capacity, slabs=usable)
                self._refuse_too_large(generation)
        self.pump()

    def _refuse_too_large(self, generation: Generation) -> None:
        """Ends what was queued before it was known that it will never fit."""
        admission, capacity = generation.admission, generation.admission.capacity
        assert capacity is not None  # it has just become known
        for stream in list(generation.queue.everybody()):
            if (need := admission.slabs(stream.length, stream.job)) > capacity.slabs:
                self._refuse(stream, never_fits(need, capacity.slabs))
