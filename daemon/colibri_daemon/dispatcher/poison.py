"""Requests that end their workers: who is suspected, who is proven guilty, and who is not asked in again. Pure; clocks
are passed in.

A strike goes to a request that was in the step in which its worker ended by its own doing. It is a suspect then and
runs alone in a worker; a second strike there is proof. A request computes the same thing at the same place of its text
whoever its neighbours are, so one that comes PROBATION_TOKENS past the place where its worker ended is cleared: else
the 31 neighbours of a bad request would have to run to their ends one after the other.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from enum import IntEnum
from typing import Protocol, TypeVar

from ..common import ipc
from ..common.job import Job

OWN_DOING = frozenset({"fault", "exit", "hang"})  # causes of death, as in common/ipc.py, for which there is a strike
FRUITLESS_MOST = 5  # deaths without a new token between them are a strike too when they were kills, or between steps
PROBATION_TOKENS = 16  # more than a worker computes without telling of it
REMEMBERED_MOST, REMEMBERED_SECONDS = 1024, 600.0
# Fields of a job that do not decide its tokens, and the seed, which may.
_BESIDE = ("generated", "salt", "cache", "owner", "prompt_logprobs", "seed", "trace", "request_id")


class Verdict(IntEnum):
    INNOCENT = 0
    SUSPECT = 1
    POISONED = 2


def judge(suspect: bool, fruitless: int, cause: str, in_step: bool) -> Verdict:
    """What the loss of its worker says about a request. suspect: it was one before, and so was alone there. fruitless:
    workers lost in a row, this one included, without a new token. in_step: it was being computed, or nobody knows."""
    own, again = cause in OWN_DOING, fruitless >= FRUITLESS_MOST
    struck = (own and in_step) or (again and (own or in_step) and cause != "stopped")
    return Verdict(suspect + struck)


def is_cleared(progress: int, struck_at: int) -> bool:
    """A suspect that has come so far, in tokens, after a strike at that place."""
    return progress >= struck_at + PROBATION_TOKENS


class Host(Protocol):
    """A worker. load: requests in it; tries: one of them is a suspect."""

    @property
    def load(self) -> int: ...

    @property
    def tries(self) -> bool: ...


H = TypeVar("H", bound=Host)


def kept_apart(hosts: Sequence[H], suspects: int) -> list[H]:
    """The workers that get nothing but suspects, of whom so many wait: those that have one, and the emptiest. At most
    half of the workers, so that the others' requests go on, but always one."""
    order = sorted(hosts, key=lambda host: (not host.tries, host.load))
    trying = sum(host.tries for host in hosts)
    return order[: max(trying, min(trying + suspects, max(1, len(order) // 2)))]


def identity(job: Job, seed: int | None) -> bytes:
    """The same for two requests whose tokens are the same. seed: as the client gave it; with None each try draws
    another one, and all of them are one request."""
    fields = {name: value for name, value in job.to_wire().items() if name not in _BESIDE}
    fields["logit_bias"] = sorted(job.logit_bias.items())
    fields["seed"] = seed if job.temperature else None
    return hashlib.blake2b(ipc.pack(sorted(fields.items())), digest_size=16).digest()


class Poisoned:
    """What was proven, by owner and identity(). Bounded: whoever was not asked for longest is forgotten first."""

    def __init__(self, most: int = REMEMBERED_MOST, seconds: float = REMEMBERED_SECONDS) -> None:
        self._most, self._seconds = most, seconds
        self._until: OrderedDict[tuple[Hashable, bytes], float] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether there is anything to ask for; mostly there is not."""
        return bool(self._until)

    def __len__(self) -> int:
        return len(self._until)

    def remember(self, owner: Hashable, request: bytes, now: float) -> None:
        self._until[owner, request] = now + self._seconds
        self._until.move_to_end((owner, request))
        if len(self._until) > self._most:
            self._until.popitem(last=False)

    def seconds_left(self, owner: Hashable, request: bytes, now: float) -> float:
        """For how long it is refused yet; 0 if it is not."""
        until = self._until.get((owner, request), now)
        if until <= now:
            self._until.pop((owner, request), None)
            return 0.0
        self._until.move_to_end((owner, request))
        return until - now
