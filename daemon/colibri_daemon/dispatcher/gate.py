"""What a request is refused for before it waits, whatever the model says to it: the daemon's state, what its owner has
live already, and that it is known to end workers (poison.py)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from colibri_protocol.errors import Code

from ..common.job import Job
from .admission import Refused
from .endings import draining, poisoned
from .health import HealthBoard
from .poison import Poisoned, identity
from .streams import Owner

if TYPE_CHECKING:
    from .generation import Generation
    from .session import Session


class Gate:
    """poisoned: whoever is in it is refused."""

    def __init__(self, health: HealthBoard) -> None:
        self.draining = False
        self.poisoned = Poisoned()
        self._health = health
        self._live: Counter[Owner] = Counter()

    def entered(self, owner: Owner) -> None:
        self._live[owner] += 1

    def left(self, owner: Owner) -> None:
        self._live[owner] -= 1
        if not self._live[owner]:
            del self._live[owner]

    def check(self, session: Session, owner: Owner, generation: Generation, now: float) -> None:
        """generation: that is to serve it."""
        if self.draining:
            raise draining()
        if reason := self._health.failed():
            raise Refused(Code.NOT_READY, f"the model is not being served: {reason}", "not_ready",
                          generation.queue.retry_after(0, now))
        uid, tenant = owner
        whose = f"of user {uid}" if tenant is None else f"of tenant {tenant!r}"
        for count, limit, place in (
            (len(session.streams), session.max_requests, "on this connection"),
            (self._live[owner], generation.settings.requests_per_uid, whose),
        ):
            if limit and count >= limit:
                raise Refused(Code.TOO_MANY_INFLIGHT, f"{count} requests {place} are live, {limit} are allowed; wait "
                              "for one to end", "peer_limit", limit=limit)

    def check_job(self, owner: Owner, job: Job, seed: int | None, now: float) -> None:
        """seed: as the client gave it."""
        if self.poisoned and (seconds := self.poisoned.seconds_left(owner, identity(job, seed), now)):
            raise poisoned(seconds)
