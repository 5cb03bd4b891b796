"""What this worker has of the KV arena, and what the pool has still to answer. Pure: it makes messages, sends nothing.

A slab that this worker may write is *leased*: it is in the free list, or one request's and being filled. A slab that is
full is *committed*: the pool's, immutable, seen through the requests that hold it. A request is *waiting* from its
attach to the pool's answer and *held* from then on until it is released. Messages are those of common/pool_ipc.py.

The pool may be lost at any time and come back knowing only what it wrote down. Requests go on meanwhile with what is in
the free list; declare() then tells the new one all that is here, and asks again what the old one has not answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..common import pool_ipc
from ..common.kv import out_of_view

Wanted = dict[str, Any]  # pool_ipc's "request"
Pairs = list[tuple[int, int]]  # (ordinal, slab)


Commit = tuple[int, int, bytes, int]  # ordinal, slab, tokens, CRC


@dataclass(slots=True)
class Held:
    """By ordinal: ``slabs`` are committed, ``own`` leased. commits: not answered, in order. next: ordinal of the next
    commit."""

    wanted: Wanted
    next: int
    slabs: dict[int, int]
    own: dict[int, int] = field(default_factory=dict)
    commits: deque[Commit] = field(default_factory=deque)


@dataclass(slots=True)
class Waiting:
    """left: it was released before the answer, and will be after it: until then nobody can tell whether an answer is on
    its way. Then ``after`` is attached, if the key has come again meanwhile."""

    wanted: Wanted
    left: bool = False
    after: Wanted | None = None


class Holdings:
    """out: messages for the pool, in order, for the caller to send and clear. linked: there is a pool to send them to;
    nothing is put out without."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.held: dict[int, Held] = {}
        self.waiting: dict[int, Waiting] = {}
        self.out: list[Any] = []
        self.linked = False
        self._asked = 0  # slabs that the pool owes us

    # ---- the free list -----------------------------------------------------------------------------------------------

    def want(self, count: int, spare: int) -> None:
        """The next steps will take ``count`` slabs: asks for those that are missing; what is more than ``spare`` over
        goes back."""
        if not self.linked:
            return
        missing = count - len(self.free) - self._asked
        if missing > 0:
            self._asked += missing
            self.out.append([pool_ipc.ALLOC, missing])
        elif len(self.free) > count + spare:
            self.out.append([pool_ipc.GIVE, self.free[count:]])
            del self.free[count:]

    def granted(self, slabs: list[int]) -> None:
        self.free += slabs
        self._asked -= len(slabs)

    def take(self, key: int, ordinal: int, count: int) -> list[int]:
        """For the request's tables, from this ordinal on; count must be free."""
        own = self.held[key].own
        slabs = [self.free.pop() for _ in range(count)]
        own.update(enumerate(slabs, ordinal))
        return slabs

    # ---- requests ----------------------------------------------------------------------------------------------------

    def attach(self, key: int, wanted: Wanted) -> None:
        """The answer comes to attached()."""
        if key in self.waiting:
            self.waiting[key].after = wanted
        else:
            self._attach(key, Waiting(wanted))

    def _attach(self, key: int, waiting: Waiting) -> None:
        self.waiting[key] = waiting
        self._say(pool_ipc.ATTACH, key, waiting.wanted)

    def attached(self, key: int, slabs: Iterable[tuple[int, int]], next: int) -> bool:
        """The request holds these and goes on with slab ``next``. False if it has left meanwhile."""
        waiting = self.waiting.pop(key)
        if not waiting.left:
            self.held[key] = Held(waiting.wanted, next, dict(slabs))
            return True
        self._say(pool_ipc.RELEASE, key)
        if waiting.after is not None:
            self._attach(key, Waiting(waiting.after))
        return False

    def full(self, key: int, count: int) -> Pairs:
        """Those of the request's first ``count`` slabs that are not committed yet; none if it has to begin again."""
        held = self.held.get(key)
        if held is None:
            return []
        return [(ordinal, held.own[ordinal]) for ordinal in range(held.next, count)]

    def commit(self, key: int, ordinal: int, slab: int, tokens: bytes, crc: int) -> None:
        """The next slab of the request is full; in the order of full()."""
        held = self.held[key]
        held.slabs[ordinal] = held.own.pop(ordinal)
        held.next = ordinal + 1
        held.commits.append((ordinal, slab, tokens, crc))
        self._say(pool_ipc.COMMIT, key, ordinal, slab, tokens, crc)

    def committed(self, key: int, ordinals: list[int]) -> list[int]:
        """The oldest commit is answered; the request holds ``ordinals`` no more. Which of them it still had: none if
        the answer is for an earlier life of the request here."""
        held = self.held.get(key)
        if held is None:
            return []
        held.commits.popleft()
        return [ordinal for ordinal in ordinals if held.slabs.pop(ordinal, None) is not None]

    def release(self, key: int) -> list[int]:
        """The request has left this worker; what it leased, which is returned, is free."""
        if key in self.waiting:
            self.waiting[key].left, self.waiting[key].after = True, None
            return []
        own = self._drop(key).own
        self._say(pool_ipc.RELEASE, key)
        return list(own.values())

    def _drop(self, key: int) -> Held:
        held = self.held.pop(key)
        self.free += held.own.values()
        return held

    # ---- damage ------------------------------------------------------------------------------------------------------

    def holders(self, slabs: Collection[int]) -> list[int]:
        """Keys of the requests that hold any of these."""
        return [key for key, held in self.held.items() if any(slab in slabs for slab in held.slabs.values())]

    @property
    def committing(self) -> list[int]:
        """Keys of the requests with a commit that is not answered."""
        return [key for key, held in self.held.items() if held.commits]

    def attach_again(self, key: int, wanted: Wanted, bad: Collection[int]) -> list[int]:
        """What the request holds cannot be trusted: it begins again behind what the pool still has. bad: slabs whose
        contents do not match. Returns what it leased, which is free. A pool that is lost before it hears of this finds
        out by itself: a new one has the contents checked at every attach."""
        held = self._drop(key)
        for slab in held.slabs.values():
            if slab in bad:
                self._say(pool_ipc.BAD, slab)
        self._say(pool_ipc.RELEASE, key)
        self._attach(key, Waiting(wanted))
        return list(held.own.values())

    def verified(self) -> None:
        """All that came of a VERIFY was said."""
        self._say(pool_ipc.VERIFIED)

    # ---- the link ----------------------------------------------------------------------------------------------------

    def lost(self) -> None:
        """There is no pool any more."""
        self.linked = False
        self.out.clear()

    def declare(self, slot: int, epoch: int, geometry: dict[str, Any]) -> None:
        """There is another pool: puts out who we are, what we have, and all that was not answered."""
        self.linked, self._asked = True, 0
        for each in self.held.values():
            _forget_hidden(each, geometry["slab_tokens"])
        held = {key: [held.wanted, sorted(held.slabs.items())] for key, held in self.held.items()}
        self.out[:] = [[pool_ipc.HELLO, {"slot": slot, "epoch": epoch, "geometry": geometry, "leased": self.leased,
                                         "held": held}]]  # fmt: skip
        for key, each in self.held.items():
            for commit in each.commits:
                self._say(pool_ipc.COMMIT, key, *commit)
        for key, waiting in self.waiting.items():
            self._say(pool_ipc.ATTACH, key, waiting.wanted)

    @property
    def leased(self) -> list[int]:
        return self.free + [slab for held in self.held.values() for slab in held.own.values()]

    def _say(self, *message: Any) -> None:
        if self.linked:
            self.out.append(list(message))


def _forget_hidden(held: Held, slab_tokens: int) -> None:
    """What a commit puts out of view the pool may have given to another before the answer was lost."""
    hidden = out_of_view(held.next * slab_tokens, held.wanted["pinned"], held.wanted["window"], slab_tokens)
    held.slabs = {ordinal: slab for ordinal, slab in held.slabs.items() if ordinal not in hidden}
    held.commits = deque(commit for commit in held.commits if commit[0] not in hidden)
