"""The links to the workers: what each one runs, what it has room for, and what it says."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ..common import ipc, log
from ..common.pages import Page
from .channel import Channel, Outbox
from .streams import Phase, Stream

WorkerId = tuple[int, int]  # slot, epoch
LINK_BYTES = 1 << 20  # a worker that has this much to read gets no more requests
_log = log.get("workers")


class Listener(Protocol):
    """Who is told what workers do."""

    def worker_ready(self, worker: Worker) -> None: ...

    def step(self, worker: Worker, number: int, rows: list[Any]) -> None: ...

    def worker_lost(self, worker: Worker, streams: list[Stream]) -> None: ...


class Worker:
    """One link, from attach to end of file. What an earlier worker of the slot said ends with its link."""

    def __init__(self, pool: WorkerPool, slot: int, epoch: int, pid: int, sock: socket.socket,
                 page: Page | None) -> None:  # fmt: skip
        self.slot, self.epoch, self.pid, self.page = slot, epoch, pid, page
        self.running: dict[int, Stream] = {}
        self.loaded = False
        self.stands_still = False  # by the supervisor's word
        self.max_seqs = self.slabs = self.chunk = 0  # from READY; slabs: of the arena that all workers share
        self.stall_ms = 0.0  # from READY: the longest step
        self.promised = 0  # slabs that what is running has to take yet
        self.steps = self.rows = self.busy_us = self.free = self.misses = 0  # from the last STEP; see ipc.py
        self._pool = pool
        self._unframer = ipc.Unframer()
        self.channel = Channel(pool.outbox, sock, self, LINK_BYTES)

    @property
    def id(self) -> WorkerId:
        """No other process of the service has or had it."""
        return self.slot, self.epoch

    @property
    def room(self) -> int:
        """Free places in the batch."""
        return self.max_seqs - len(self.running)

    @property
    def listens(self) -> bool:
        """Reads what it is sent, as far as can be seen."""
        return self.channel.buffered < LINK_BYTES and not self.stands_still

    @property
    def takes(self) -> bool:
        return self.loaded and self.room > 0 and self.listens

    def assign(self, stream: Stream, slabs: int) -> None:
        """slabs: promised to it until settle()."""
        stream.phase, stream.worker, stream.slot, stream.promised = Phase.RUNNING, self, self.slot, slabs
        stream.paused = stream.plain = False
        self.running[stream.key] = stream
        self.promised += slabs
        self.say(ipc.ASSIGN, stream.key, stream.job.to_wire())

    def settle(self, stream: Stream) -> None:
        """What was promised to the stream it has."""
        self.promised -= stream.promised
        stream.promised = 0

    def release(self, stream: Stream) -> None:
        """The last row of the stream has come."""
        del self.running[stream.key]
        self.settle(stream)
        stream.worker = None

    def say(self, *message: Any) -> None:
        self.channel.write(ipc.pack(message))

    def stop(self) -> None:
        """Closes the link; the worker ends itself when it sees that. Gives back what was running."""
        self.loaded = False
        self.channel.close()
        lost, self.running = list(self.running.values()), {}
        for stream in lost:
            self.settle(stream)
            stream.worker = None
        self._pool.lost(self, lost)

    def hear_out(self) -> None:
        """Its process says nothing any more: takes what is left on the link, and closes it."""
        self.channel.read_all()
        if not self.channel.closed:
            self.stop()

    def received(self, data: bytes) -> None:
        try:
            for message in self._unframer.feed(data):
                self._take(message)
        except Exception:  # theirs or ours: what this message left half done is done again elsewhere
            _log.exception("a worker broke the link protocol", worker=self.slot, worker_pid=self.pid)
            self._pool.distrust(self)
            self.stop()

    def ended(self, error: OSError | None) -> None:
        self.stop()

    def crowded(self) -> None:
        """``takes`` looks at the channel by itself."""

    def _take(self, message: list[Any]) -> None:
        if message[0] == ipc.STEP:
            _, number, rows, info = message
            self.steps, self.free, self.misses = number, info["free"], info["misses"]
            self.rows += info["rows"]
            self.busy_us += info["us"]
            self._pool.listener.step(self, number, rows)
        elif message[0] == ipc.READY:
            info = message[1]
            self.max_seqs, self.slabs, self.chunk = info["max_seqs"], info["slabs"], info["chunk"]
            self.stall_ms, self.loaded = info["stall_ms"], True
            self._pool.loaded(self)
            self._pool.listener.worker_ready(self)
        else:
            raise ValueError(f"link message {message[0]!r}")


class WorkerPool:
    """The workers of a generation by slot."""

    def __init__(self, outbox: Outbox, distrust: Callable[[Worker], None] = lambda _: None,
                 loaded: Callable[[Worker], None] = lambda _: None) -> None:
        """distrust(worker) has the process ended. loaded(worker) is called before the listener is told."""
        self.outbox, self.distrust, self.loaded = outbox, distrust, loaded
        self.listener: Listener
        self._slots: dict[int, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._slots.values())

    def attach(self, slot: int, epoch: int, pid: int, sock: socket.socket, page: Page | None = None) -> None:
        """A new worker's link; it replaces the slot's former one. page: the process's own."""
        if slot in self._slots:
            self._slots[slot].stop()
        self._slots[slot] = Worker(self, slot, epoch, pid, sock, page)

    def had(self, worker: Worker) -> bool:
        """Whether it is or was one of these."""
        return worker._pool is self

    def lost(self, worker: Worker, streams: list[Stream]) -> None:
        if self._slots.get(worker.slot) is worker:
            del self._slots[worker.slot]
        self.listener.worker_lost(worker, streams)

    def best(self) -> Worker | None:
        """The loaded worker with most free places; None if there is none."""
        return max((worker for worker in self._slots.values() if worker.takes), key=lambda w: w.room, default=None)

    def close(self) -> None:
        """Without telling anyone: the process ends."""
        for worker in self._slots.values():
            worker.channel.close()
        self._slots.clear()
