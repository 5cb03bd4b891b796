"""The link to the KV pool: what the pool tells of its slabs, and what it is asked. See common/pool_ipc.py.

While there is no pool the numbers stay as they were told last; what is asked then is answered with "nothing cached".
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ..common import ipc, log, pool_ipc
from ..common.job import Job
from .channel import Channel, Outbox
from .workers import Worker, WorkerId, WorkerPool

LINK_BYTES = 1 << 20  # a pool that has this much to read is asked nothing more
LOOKUPS_MOST = 256  # unanswered
LOOKUP_SECONDS, EVICT_SECONDS = 1.0, 10.0  # for an answer
TOKEN = 4  # bytes of an id
_LABELLED = re.compile(r'(kv_slabs|kv_leases)\{\w+="(\w+)"\}')
_log = log.get("pool")
Answer = Callable[[int], None]


class Shortage(Protocol):
    """Who is told that slabs have run out."""

    def rise(self, worker: WorkerId, missing: int) -> None:
        """The worker waits for so many slabs, and none can be had by eviction."""

    def fall(self, worker: WorkerId) -> None:
        """It waits no more, or is gone."""

    def reset(self) -> None:
        """The pool is gone: nobody is known to wait."""


class PoolLink:
    """room_changed() is called when there are new numbers, shortage's methods when slabs run out.

    slabs: by state; counters: by metric; leases: slabs by worker slot; available: slabs that are free or cached,
    None until the pool has told. All as told last. users: the workers of each generation that share it."""

    def __init__(self, outbox: Outbox) -> None:
        self.room_changed: Callable[[], None]
        self.shortage: Shortage
        self.users: list[WorkerPool] = []
        self.slabs: dict[str, int] = {}
        self.counters: dict[str, float] = {}
        self.leases: dict[int, int] = {}
        self.available: int | None = None
        self._outbox = outbox
        self._channel: Channel | None = None
        self._unframer = ipc.Unframer()
        self._asked: dict[int, tuple[Callable[[Any], None], Any, asyncio.TimerHandle]] = {}  # who, and what if nothing
        self._next_id = 1

    @property
    def connected(self) -> bool:
        return self._channel is not None

    @property
    def usable(self) -> int | None:
        """Slabs that a request can ever have; None if not known."""
        return sum(self.slabs.values()) - self.slabs.get("quarantined", 0) if self.slabs else None

    def workers(self) -> Iterator[Worker]:
        """All that share it."""
        for users in self.users:
            yield from users

    def attach(self, sock: socket.socket) -> None:
        """The link to a pool, which replaces the former one."""
        self._lose()
        self._channel = Channel(self._outbox, sock, self, LINK_BYTES)

    def drop(self, key: int) -> None:
        """The request has ended. Lost with the pool: the next one knows of no request that no worker has."""
        if self._channel is not None:
            self._channel.write(ipc.pack([pool_ipc.DROP, key]))

    def killed(self, worker: WorkerId) -> None:
        """Others may take its requests over. Lost with the pool: the next one waits until the worker is reaped."""
        if self._channel is not None:
            self._channel.write(ipc.pack([pool_ipc.KILLED, worker]))

    def lookup(self, job: Job, answer: Answer) -> None:
        """answer(n) is called once: n tokens of the job's prompt are cached now. At once or later, and with 0 if the
        pool does not say."""
        channel = self._channel
        crowded = len(self._asked) >= LOOKUPS_MOST
        if channel is None or crowded or channel.buffered > LINK_BYTES or not job.cache:
            return answer(0)
        request = {"tokens": job.tokens, "salt": job.salt, "use": True, "pinned": job.pinned, "window": job.window,
                   "positions": job.positions, "limit": len(job.tokens) // TOKEN - 1}  # fmt: skip
        self._ask(channel, pool_ipc.LOOKUP, request, answer, 0, LOOKUP_SECONDS)

    def evict(self, owner: bytes | None, answer: Callable[[int | None], None]) -> None:
        """Drops what is cached of the owner, or of all. answer(n) is called once, at once or later: n slabs became
        free; None if the pool does not say."""
        if self._channel is None:
            return answer(None)
        self._ask(self._channel, pool_ipc.EVICT, owner, answer, None, EVICT_SECONDS)

    def _ask(self, channel: Channel, tag: int, what: Any, answer: Callable[[Any], None], default: Any,
             seconds: float) -> None:
        self._next_id += 1
        timer = self._outbox.loop.call_later(seconds, self._answered, self._next_id, default)
        self._asked[self._next_id] = answer, default, timer
        channel.write(ipc.pack([tag, self._next_id, what]))

    def close(self) -> None:
        """Without telling anyone: the process ends."""
        for _, _, timer in self._asked.values():
            timer.cancel()
        self._asked.clear()
        if self._channel is not None:
            self._channel.close()

    # ---- the channel's owner ---------------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        try:
            for message in self._unframer.feed(data):
                self._take(message)
        except Exception:
            _log.exception("the KV pool broke the link protocol")
            self._lose()

    def ended(self, error: OSError | None) -> None:
        _log.warning("the KV pool is gone")
        self._lose()

    def crowded(self) -> None:
        """``lookup`` looks at the channel by itself."""

    def _lose(self) -> None:
        """There is no pool, or a new one."""
        self._unframer = ipc.Unframer()
        if self._channel is None:
            return
        self._channel.close()
        self._channel = None
        for number, (_, default, _) in list(self._asked.items()):
            self._answered(number, default)
        if not self.available:  # it was short, and nobody says when it is no more
            self.available = None
        self.shortage.reset()

    def _take(self, message: list[Any]) -> None:
        tag, *fields = message
        _HANDLERS[tag](self, *fields)

    def _stats(self, numbers: dict[str, float]) -> None:
        labelled: dict[str, dict[str, int]] = {"kv_slabs": {}, "kv_leases": {}}
        counters = {}
        for name, number in numbers.items():
            if found := _LABELLED.fullmatch(name):
                labelled[found[1]][found[2]] = int(number)
            else:
                counters[name] = number
        slabs, leases = labelled.values()
        self.available = slabs["free"] + slabs["cached"]
        self.slabs, self.counters = slabs, counters
        self.leases = {int(slot): count for slot, count in leases.items()}
        self.room_changed()

    def _answered(self, number: int, found: Any) -> None:
        if (waiting := self._asked.pop(number, None)) is not None:
            answer, _, timer = waiting
            timer.cancel()
            answer(found)

    def _short(self, worker: list[int], missing: int) -> None:
        self.available = 0  # newer than the last STATS
        self.shortage.rise(_id(worker), missing)

    def _relieved(self, worker: list[int]) -> None:
        self.shortage.fall(_id(worker))


def _id(worker: list[int]) -> WorkerId:
    slot, epoch = worker
    return slot, epoch


_HANDLERS: dict[int, Callable[..., None]] = {
    pool_ipc.STATS: PoolLink._stats, pool_ipc.LOOKED: PoolLink._answered, pool_ipc.EVICTED: PoolLink._answered,
    pool_ipc.SHORT: PoolLink._short, pool_ipc.RELIEVED: PoolLink._relieved,
}  # fmt: skip
