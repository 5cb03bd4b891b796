"""The worker's slabs of the shared KV arena: holdings.py with its link to the pool, and the memory itself.

A slab can be written from take() to its commit or to the end of its request, and at no other time (guard.py).

Nothing here waits for the pool. What it says is handled when it comes; what it has not given yet, the caller does
without. What it is told leaves with flush(). Output is bounded by what a worker can hold: a commit for each slab, an
attach for each request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Protocol

import crc32c
from colibri_engine._colibri import ffi
from colibri_engine.batch import Lane
from colibri_engine.binding import POSITIONS
from colibri_engine.sequence import KvMemory

from ..common import pool_ipc
from ..common.link import Link
from .guard import Guard
from .holdings import Holdings

_MODES = {number: name for name, number in POSITIONS.items()}


class Listener(Protocol):
    """Who is told what the pool says of requests, by key."""

    def attached(self, key: int, position: int, slabs: list[tuple[int, int]]) -> None:
        """The first ``position`` tokens need not be computed; slabs: (ordinal, slab) of those in view."""

    def hidden(self, key: int, ordinals: list[int]) -> None:
        """These slabs are out of view and not the request's any more."""

    def damaged(self, key: int, slabs: Collection[int]) -> None:
        """What the request holds cannot be trusted: attach_again(). slabs: those, of any request, whose contents are
        not what was written."""

    def suspected(self, key: int, position: int) -> None:
        """What the request has computed from this position on may not be what was written, and nothing can tell."""


class PoolKv:
    """memory: the arena. geometry: as in pool_ipc.HELLO."""

    def __init__(self, memory: KvMemory, geometry: dict[str, Any]) -> None:
        self.memory, self._geometry = memory, geometry
        self._slab_tokens: int = geometry["slab_tokens"]
        self._guard = Guard(int(ffi.cast("uintptr_t", memory.buffer.ptr)), memory.slabs, geometry["slab_bytes"])
        self._holdings = Holdings()
        self.link: Link | None = None
        self.listener: Listener

    @property
    def total(self) -> int:
        return self.memory.slabs

    @property
    def leased(self) -> int:
        """Slabs that no other worker may use."""
        return len(self._holdings.leased)

    @property
    def free(self) -> int:
        """Slabs to be had at once."""
        return len(self._holdings.free)

    # ---- the link ----

    def connect(self, link: Link, slot: int, epoch: int) -> None:
        """To the pool, or to the one that replaces it; this worker is (slot, epoch)."""
        self.link = link
        self._holdings.declare(slot, epoch, self._geometry)
        self.flush()

    def disconnect(self) -> None:
        """The link is closed, by whoever is to close it; goes on with what is here."""
        self.link = None
        self._holdings.lost()

    def receive(self) -> None:
        """Handles what has come. The link may be closed afterwards: then there is no pool until connect()."""
        for tag, *body in self._messages():
            _HANDLERS[tag](self, *body)

    def _messages(self) -> Iterator[Any]:
        return self.link.receive() if self.link else iter(())

    def flush(self) -> None:
        """Sends what the calls below have to say to the pool: each message alone would wake it."""
        if self.link is not None and self._holdings.out:
            self.link.send(*self._holdings.out)
            self._holdings.out.clear()

    def _granted(self, slabs: list[int]) -> None:
        self._holdings.granted(slabs)

    def _attached(self, key: int, position: int, slabs: list[tuple[int, int, int | None]]) -> None:
        pairs = [(ordinal, slab) for ordinal, slab, _ in slabs]
        if not self._holdings.attached(key, pairs, position // self._slab_tokens):
            return
        bad = self._mismatches((slab, crc) for _, slab, crc in slabs if crc is not None)
        for holder in self._holdings.holders(bad):
            self.listener.damaged(holder, bad)
        if not bad:
            self.listener.attached(key, position, pairs)

    def _committed(self, key: int, ordinals: list[int]) -> None:
        if gone := self._holdings.committed(key, ordinals):
            self.listener.hidden(key, gone)

    def _verify(self, slabs: list[tuple[int, int | None]]) -> None:
        """Another worker died by a fault. All that this one has is put right before the next step, so that no token
        more is made of damage: a slab without a CRC, or whose commit is not answered, may hold something computed from
        it, and those that are being filled have no CRC yet."""
        holdings = self._holdings
        bad = self._mismatches((slab, crc) for slab, crc in slabs if crc is not None)
        lost = bad | {slab for slab, crc in slabs if crc is None}
        for key in {*holdings.holders(lost), *holdings.committing}:
            self.listener.damaged(key, bad)
        for key, held in holdings.held.items():
            if held.own:
                self.listener.suspected(key, held.next * self._slab_tokens)
        holdings.verified()

    def _mismatches(self, slabs: Iterable[tuple[int, int]]) -> set[int]:
        return {slab for slab, crc in slabs if self._crc(slab) != crc}

    def _crc(self, slab: int) -> int:
        return crc32c.crc32c(self.memory.slab(slab))

    # ---- for the loop ----

    def want(self, count: int, spare: int) -> None:
        """The next steps will take ``count`` slabs; more than ``spare`` over are given back."""
        self._holdings.want(count, spare)

    def attach(self, lane: Lane, salt: bytes, use: bool) -> None:
        """Asks for whatever of the lane's text is in the cache; the answer goes to the listener."""
        self._holdings.attach(lane.id, self._wanted(lane, salt, use))

    def attach_again(self, lane: Lane, salt: bytes, use: bool, bad: Collection[int], doubts: int = 0) -> None:
        """The same for a lane that was rewound because what it holds is damaged, or may be. bad: as in damaged().
        doubts: how often its logits made no sense: first all that it gets is verified, then it gets nothing."""
        wanted = self._wanted(lane, salt, use)
        if doubts:
            wanted |= {"verify": True, "limit": wanted["limit"] if doubts == 1 else 0}
        self._guard.close(self._holdings.attach_again(lane.id, wanted, bad))

    def _wanted(self, lane: Lane, salt: bytes, use: bool) -> dict[str, Any]:
        how = lane.attention
        return {"tokens": lane.tokens[: lane.length].tobytes(), "salt": salt, "use": use, "pinned": how.pinned,
                "window": how.window, "positions": _MODES[how.positions], "limit": lane.cacheable}  # fmt: skip

    def take(self, lane: Lane, count: int) -> None:
        """Slabs for the positions behind the lane's table; count must be free."""
        slabs = self._holdings.take(lane.id, lane.n_slabs, count)
        self._guard.open(slabs)
        lane.add_slabs(slabs)

    def copy(self, lane: Lane, slab: int, position: int) -> None:
        """A slab of the lane's own, which must be free, with what this one has up to the position."""
        self.take(lane, 1)
        self.memory.slab(int(lane.slabs[lane.n_slabs - 1]))[:] = self.memory.slab(slab)
        lane.position = position

    def commit(self, lane: Lane) -> None:
        """What the lane has computed was told: its full slabs may be others' too."""
        size = self._slab_tokens
        for ordinal, slab in self._holdings.full(lane.id, lane.position // size):
            tokens = lane.tokens[ordinal * size : (ordinal + 1) * size].tobytes()
            self._guard.close([slab])
            self._holdings.commit(lane.id, ordinal, slab, tokens, self._crc(slab))

    def release(self, key: int) -> None:
        """The request leaves this worker, whether it was attached or still waits to be."""
        self._guard.close(self._holdings.release(key))


_HANDLERS = {pool_ipc.GRANT: PoolKv._granted, pool_ipc.ATTACHED: PoolKv._attached,
             pool_ipc.COMMITTED: PoolKv._committed, pool_ipc.VERIFY: PoolKv._verify}  # fmt: skip
