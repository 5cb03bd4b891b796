"""Who talks to whom: a link between the dispatcher and each worker, and one from each of them to the pool.

A link lives as long as both its processes. When one is new it gets a link to each of the others that run; an end for a
process that does not run is closed, which the other one sees. For the messages: common/ipc.py, common/pool_ipc.py.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence

from ..common import ipc
from .children import Child, Worker
from .lifecycle import State
from .spawn import Death

# Deaths after which whatever the process could write to is suspect.
FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})


class Links:
    def __init__(self, kvpool: Child, dispatcher: Child, workers: Sequence[Worker]) -> None:
        self._kvpool, self._dispatcher, self._workers = kvpool, dispatcher, workers

    def pool_started(self) -> None:
        """It must know first who may have slabs. A worker says hello after it said ready, so those that load have
        none."""
        alive = [worker for worker in self._workers if worker.process is not None]
        holders = [[worker.slot, worker.epoch] for worker in alive if worker.life.state is not State.LOADING]
        self._kvpool.tell({"t": "peers", "workers": holders})
        for child in (self._dispatcher, *alive):
            self._to_pool(child)

    def dispatcher_started(self) -> None:
        self._to_pool(self._dispatcher)
        for worker in self._workers:
            if worker.process is not None:
                theirs, ours = ipc.link()
                worker.tell({"t": "link"}, theirs)
                self._to_dispatcher(worker, ours)

    def worker_started(self, worker: Worker, end: socket.socket) -> None:
        """end: the dispatcher's, of the link that the worker was born with."""
        self._to_pool(worker)
        self._to_dispatcher(worker, end)

    def worker_dead(self, worker: Worker, death: Death) -> None:
        """It is reaped: nothing of it can write any more."""
        self._kvpool.tell({"t": "dead", "slot": worker.slot, "epoch": worker.epoch, "fault": -death.code in FAULTS})

    def _to_dispatcher(self, worker: Worker, end: socket.socket) -> None:
        self._dispatcher.tell({"t": "worker", "slot": worker.slot, "epoch": worker.epoch, "pid": worker.pid}, end)

    def _to_pool(self, child: Child) -> None:
        if child.process is None or self._kvpool.process is None:
            return
        kind, slot = ("worker", child.slot) if isinstance(child, Worker) else ("dispatcher", 0)
        theirs, ours = ipc.link()
        child.tell({"t": "pool", "slot": slot, "epoch": child.epoch}, theirs)
        self._kvpool.tell({"t": "peer", "kind": kind, "slot": slot, "epoch": child.epoch, "pid": child.pid}, ours)
