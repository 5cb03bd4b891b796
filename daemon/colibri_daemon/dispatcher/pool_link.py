"""The link to the KV pool: what the pool tells of its slabs, and what it is asked. See common/pool_ipc.py.

While there is no pool the numbers stay as they were told last; what is asked then is answered with "nothing cached".
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from typing import Any, Protocol

from ..common import ipc, log, pool_ipc
from ..common.job import Job
from .channel import Channel, Outbox

LINK_BYTES = 1 << 20  # a pool that has this much to read is asked nothing more
LOOKUPS_MOST = 256  # unanswered
LOOKUP_SECONDS = 1.0  # for an answer
TOKEN = 4  # bytes of an id
_LABELLED = re.compile(r'(kv_slabs|kv_leases)\{\w+="(\w+)"\}')
_log = log.get("pool")
Answer = Callable[[int], None]


class Shortage(Protocol):
    """Who is told that slabs have run out."""

    def rise(self, slot: int, missing: int) -> None:
        """The worker waits for so many slabs, and none can be had by eviction."""

    def fall(self, slot: int) -> None:
        """It waits no more, or is gone."""

    def reset(self) -> None:
        """The pool is gone: nobody is known to wait."""


class PoolLink:
    """room_changed() is called when there are new numbers, shortage's methods when slabs run out.

    slabs: by state; counters: by metric; leases: slabs by worker slot; available: slabs that are free or cached,
    None until the pool has told. All as told last."""

    def __init__(self, outbox: Outbox) -> None:
        self.room_changed: Callable[[], None]
        self.shortage: Shortage
        self.slabs: dict[str, int] = {}
        self.counters: dict[str, float] = {}
        self.leases: dict[int, int] = {}
        self.available: int | None = None
        self._outbox = outbox
        self._channel: Channel | None = None
        self._unframer = ipc.Unframer()
        self._lookups: dict[int, tuple[Answer, asyncio.TimerHandle]] = {}
        self._next_id = 1

    @property
    def usable(self) -> int | None:
        """Slabs that a request can ever have; None if not known."""
        return sum(self.slabs.values()) - self.slabs.get("quarantined", 0) if self.slabs else None

    def attach(self, sock: socket.socket) -> None:
        """The link to a pool, which replaces the former one."""
        self._lose()
        self._channel = Channel(self._outbox, sock, self, LINK_BYTES)

    def drop(self, key: int) -> None:
        """The request has ended. Lost with the pool: the next one knows of no request that no worker has."""
        if self._channel is not None:
            self._channel.write(ipc.pack([pool_ipc.DROP, key]))

    def lookup(self, job: Job, answer: Answer) -> None:
        """answer(n) is called once: n tokens of the job's prompt are cached now. At once or later, and with 0 if the
        pool does not say."""
        channel = self._channel
        crowded = len(self._lookups) >= LOOKUPS_MOST
        if channel is None or crowded or channel.buffered > LINK_BYTES or not job.cache:
            return answer(0)
        self._next_id += 1
        request = {"tokens": job.tokens, "salt": job.salt, "use": True, "pinned": job.pinned, "window": job.window,
                   "positions": job.positions, "limit": len(job.tokens) // TOKEN - 1}  # fmt: skip
        timer = self._outbox.loop.call_later(LOOKUP_SECONDS, self._looked, self._next_id, 0)
        self._lookups[self._next_id] = answer, timer
        channel.write(ipc.pack([pool_ipc.LOOKUP, self._next_id, request]))

    def close(self) -> None:
        """Without telling anyone: the process ends."""
        for _, timer in self._lookups.values():
            timer.cancel()
        self._lookups.clear()
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
        for lookup in list(self._lookups):
            self._looked(lookup, 0)
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

    def _looked(self, lookup: int, cached: int) -> None:
        if (waiting := self._lookups.pop(lookup, None)) is not None:
            answer, timer = waiting
            timer.cancel()
            answer(cached)

    def _short(self, slot: int, missing: int) -> None:
        self.available = 0  # newer than the last STATS
        self.shortage.rise(slot, missing)

    def _relieved(self, slot: int) -> None:
        self.shortage.fall(slot)


_HANDLERS: dict[int, Callable[..., None]] = {
    pool_ipc.STATS: PoolLink._stats, pool_ipc.LOOKED: PoolLink._looked, pool_ipc.SHORT: PoolLink._short,
    pool_ipc.RELIEVED: PoolLink._relieved,
}  # fmt: skip
