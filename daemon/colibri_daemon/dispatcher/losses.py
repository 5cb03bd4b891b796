"""The requests of lost workers, until it is known how the worker died.

A link ends before the supervisor has reaped the process. Nobody gets its requests before that: the pool is told of the
death first, so that whoever attaches in the dead worker's place has its slabs verified; and what a request may have
done to its worker is judged before it can do it to another. Of SIGKILL from outside, after which there is nothing to
verify and no request to blame, the dispatcher itself learns earlier (watch.py).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from .streams import Stream
from .workers import Worker, WorkerId

HOLD_SECONDS = 1.5  # then they go on all the same: a core dump may take its time
REMEMBERED_MOST = 256  # deaths told of before the end of the link was seen


@dataclass(frozen=True)
class Death:
    """cause: as in the "dead" message (common/ipc.py), "unknown" if none came in time. keys: of the requests in the
    step that was running."""

    cause: str = "unknown"
    keys: frozenset[int] = frozenset()


class Losses:
    """bereaved(worker, death, streams) is called once for each lost worker that had requests."""

    def __init__(self, loop: asyncio.AbstractEventLoop,
                 bereaved: Callable[[Worker, Death, list[Stream]], None]) -> None:
        self._loop, self._bereaved = loop, bereaved
        self._held: dict[WorkerId, tuple[Worker, list[Stream], asyncio.TimerHandle]] = {}
        self._deaths: OrderedDict[WorkerId, Death] = OrderedDict()
        self._known: set[WorkerId] = set()  # were killed, and are not reaped yet

    def lost(self, worker: Worker, streams: list[Stream]) -> None:
        """The link has ended."""
        if (death := self._deaths.pop(worker.id, None)) is not None:
            return self._bereaved(worker, death, streams)
        timer = self._loop.call_later(HOLD_SECONDS, self.dead, worker.id, Death())
        self._held[worker.id] = worker, streams, timer

    def killed(self, worker: WorkerId, death: Death) -> None:
        """As dead(), which will follow and be no news."""
        self.dead(worker, death)
        self._known.add(worker)

    def dead(self, worker: WorkerId, death: Death) -> None:
        """The process is reaped."""
        if worker in self._known:
            return self._known.remove(worker)
        if (held := self._held.pop(worker, None)) is not None:
            lost, streams, timer = held
            timer.cancel()
            return self._bereaved(lost, death, streams)
        self._deaths[worker] = death
        if len(self._deaths) > REMEMBERED_MOST:
            self._deaths.popitem(last=False)

    def close(self) -> None:
        for _, _, timer in self._held.values():
            timer.cancel()
        self._held.clear()
