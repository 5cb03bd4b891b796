"""Who talks to whom: a link between a dispatcher and each of its workers, and one from each of them to their pool.

A link lives as long as both its processes. When one is new it gets a link to each of the others that run; an end for a
process that does not run is closed, which the other one sees. For the messages: common/ipc.py, common/pool_ipc.py.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from ..common import ipc
from .children import Child, Worker
from .deaths import cause, is_fault
from .generation import Dispatcher, Generation, Pool
from .lifecycle import State
from .spawn import Death


def pool_started(pool: Pool, users: Sequence[Generation]) -> None:
    """It must know first who may have slabs. A worker says hello after it said ready, so those that load have none."""
    alive = [worker for generation in users for worker in generation.workers if worker.process is not None]
    holders = [[worker.slot, worker.epoch] for worker in alive if worker.life.state is not State.LOADING]
    fault = {} if pool.missed_fault is None else {"fault": pool.missed_fault}
    pool.tell({"t": "peers", "workers": holders, "usable": pool.usable, **fault})
    if pool.retired:
        pool.tell({"t": "retire"})
    for child in (*dict.fromkeys(generation.dispatcher for generation in users), *alive):
        _to_pool(child, pool)


def dispatcher_started(dispatcher: Dispatcher, leads: Generation, others: Sequence[Generation]) -> None:
    """leads: the generation that the dispatcher was born with. others: that it is to know too."""
    for generation in others:
        introduce(generation)
    for pool in dict.fromkeys(generation.pool for generation in (leads, *others)):
        _to_pool(dispatcher, pool)
    for generation in (leads, *others):
        for worker in generation.workers:
            if worker.process is not None:
                theirs, ours = ipc.link()
                worker.tell({"t": "link"}, theirs)
                _to_dispatcher(dispatcher, worker, ours)


def introduce(generation: Generation) -> None:
    """A later generation, to its dispatcher."""
    generation.dispatcher.tell({"t": "generation", "generation": generation.number, "pool": generation.pool.number,
                                "settings": generation.settings.to_json(), "facts": generation.facts.to_wire()})


def worker_started(worker: Worker, generation: Generation, end: socket.socket) -> None:
    """end: the dispatcher's, of the link that the worker was born with."""
    _to_pool(worker, generation.pool)
    _to_dispatcher(generation.dispatcher, worker, end)


def worker_doomed(worker: Worker, generation: Generation) -> None:
    """It is about to be signalled by us."""
    generation.dispatcher.tell({"t": "doomed", "slot": worker.slot, "epoch": worker.epoch})


def worker_dead(worker: Worker, generation: Generation, death: Death) -> None:
    """It is reaped: nothing of it can write any more. The pool knows first, so that nobody attaches in its place before
    that."""
    said: dict[str, Any] = {"t": "dead", "slot": worker.slot, "epoch": worker.epoch}
    generation.pool.tell(said | {"fault": is_fault(death.code)})
    generation.dispatcher.tell(said | {"cause": cause(death.code, worker.life.state),
                                       "keys": worker.page.running_keys()})


def _to_dispatcher(dispatcher: Dispatcher, worker: Worker, end: socket.socket) -> None:
    dispatcher.tell({"t": "worker", "generation": worker.generation, "slot": worker.slot, "epoch": worker.epoch,
                     "pid": worker.pid, "page": worker.page.place[1]}, end)  # fmt: skip


def _to_pool(child: Child, pool: Pool) -> None:
    if child.process is None or pool.process is None:
        return
    kind, slot = ("worker", child.slot) if isinstance(child, Worker) else ("dispatcher", 0)
    theirs, ours = ipc.link()
    child.tell({"t": "pool", "pool": pool.number, "slot": slot, "epoch": child.epoch}, theirs)
    pool.tell({"t": "peer", "kind": kind, "slot": slot, "epoch": child.epoch, "pid": child.pid}, ours)
