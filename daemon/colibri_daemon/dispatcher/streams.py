"""One record per live request, and the messages that can be made of it alone.

    QUEUED ──assign──> RUNNING ──last row──> ENDED                    (the usual way)
     ^ ^                 │ └─────last row──> HELD ──credit──> ENDED   (the client has not allowed the rest to be sent)
     │ └───preempted─────┤
     └──── LOST <────────┘                                            (until it is known how its worker died)
    any ──cancel, deadline, drain──> ENDED, from RUNNING with the worker's last row

requests.py makes the transitions, relay.py moves the tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from colibri_protocol.messages import Done, Receipt, StopMatch, Times, Usage

from ..common.job import Job

if TYPE_CHECKING:
    from .generation import Generation
    from .session import Session
    from .workers import Worker

TOKEN = 4  # bytes of an id
Match = tuple[str, int] | None  # StopMatch: kind and value
Owner = tuple[int, str | None]  # uid and tenant: whose share it is, and whose fault
UNLIMITED = 1 << 62  # credit of a stream without flow control


class Phase(IntEnum):
    QUEUED = 0
    RUNNING = 1
    LOST = 2
    HELD = 3
    ENDED = 4


class Leaving(IntEnum):
    """What a running request gives way for."""

    SLABS = 0
    PLACE = 1  # the place itself: somebody else's fair share, or the next suspect's turn


class Held:
    """Log probabilities of the tokens that were not sent yet. top: alternatives per token."""

    __slots__ = ("_arrays", "_top")

    def __init__(self, top: int) -> None:
        self._top = top
        self._arrays = {"logprobs": bytearray(), "top_ids": bytearray(), "top_logprobs": bytearray()}

    def put(self, logprobs: bytes, top_ids: bytes, top_logprobs: bytes) -> None:
        for array, more in zip(self._arrays.values(), (logprobs, top_ids, top_logprobs), strict=True):
            array += more

    def take(self, count: int) -> dict[str, bytes]:
        """Fields of TOKENS for the next count tokens."""
        taken = {}
        for name, array in self._arrays.items():
            size = TOKEN * count * (1 if name == "logprobs" else self._top)
            if size:
                taken[name] = bytes(array[:size])
                del array[:size]
        return taken


class Stream:
    """Times are monotonic seconds, counts are of tokens. All output so far is in ``tokens``, what was resumed included,
    so that any worker can go on from it."""

    __slots__ = (
        "arrived", "asked_seed", "assigned_at", "attempt", "base", "cached", "cancelled", "charged",
        "connection", "cost", "credit",
        "deadline", "displaced", "echo_usage", "finish", "first_at", "forced", "fruitless", "generated", "generation",
        "held", "id", "job", "key", "last_at", "leaving", "length", "lost", "mark", "match", "moving", "origin",
        "owner", "paused", "phase", "plain", "preemptions", "priority", "promised", "prompt", "scored", "sent",
        "session", "slot", "starved_since", "step", "struck_at", "timer", "tokens", "worker",
    )  # fmt: skip

    def __init__(self, key: int, request_id: int, session: Session, generation: Generation, job: Job,
                 owner: Owner, message: Any, now: float) -> None:
        """message: the GENERATE or SCORE."""
        resume = getattr(message, "resume", None)
        self.asked_seed: int | None = resume.seed if resume else getattr(message, "seed", None)
        self.key = key  # unique in the life of the dispatcher; grows with arrival
        self.id = request_id
        self.session: Session | None = session  # None: the client is gone
        self.connection = session.number  # for logs
        self.job = job
        self.generation = self.origin = generation  # that has to serve it; that admitted it
        self.moving = False  # was told to leave its worker for one of another generation
        self.owner, self.priority = owner, message.priority
        self.tokens = bytearray(job.generated)
        self.base = self.sent = self.charged = len(job.generated) // TOKEN  # resumed; sent; counted for its owner
        self.prompt = len(job.tokens) // TOKEN
        self.cost = self.prompt + self.base  # to be computed before the next token
        self.length = self.prompt + job.max_tokens
        self.arrived, self.deadline = now, now + message.deadline_ms / 1000
        self.timer: asyncio.TimerHandle | None = None
        self.assigned_at = self.first_at = self.last_at = 0.0
        self.phase = Phase.QUEUED
        self.worker: Worker | None = None
        self.promised = 0  # KV slabs that it has to take yet
        self.slot: int | None = None  # of the last worker
        self.attempt = self.fruitless = 0  # assignments; lost workers in a row without progress
        self.leaving: Leaving | None = None  # was told to give way to others, and has not yet
        self.preemptions = self.displaced = 0  # times that it gave way for want of slabs, and to somebody's fair share
        self.lost = ""  # how its worker died, while it waits for another
        self.struck_at: int | None = None  # progress when it became a suspect (poison.py)
        self.mark = 0  # progress at the last assignment
        self.credit = UNLIMITED
        self.plain = False  # the next row can be relayed the short way
        self.paused = False  # the worker was told to leave it out
        self.starved_since: float | None = None  # out of credit with tokens to send
        self.held: Held | None = None if job.logprobs is None else Held(job.logprobs)
        self.echo_usage = getattr(message, "echo_usage", False)
        self.cached = self.generated = 0
        self.step = 0  # of the worker, at the last row that went the long way
        self.scored = 0  # SCORES were sent for the positions below
        self.match: Match = None
        self.forced: str | None = None  # finish that was asked for: abort, deadline or draining
        self.finish = ""  # finish that was computed, while HELD
        self.cancelled: tuple[float, str] | None = None  # when its client did not want it any more, and its doing then

    @property
    def is_score(self) -> bool:
        return self.job.score_from is not None

    @property
    def is_leaving(self) -> bool:
        """Its worker, for whatever reason; or it is to be left where it is, being under suspicion."""
        return self.moving or self.leaving is not None or self.forced is not None or self.struck_at is not None

    @property
    def progress(self) -> int:
        """Grows with everything a worker delivers."""
        return len(self.tokens) // TOKEN + self.scored

    @property
    def doing(self) -> str:
        """queued, prefill or decode."""
        if self.worker is None:
            return "queued"
        return "decode" if self.first_at else "prefill"

    @property
    def pending(self) -> int:
        """Tokens that are there and not sent."""
        return len(self.tokens) // TOKEN - self.sent

    @property
    def delivered(self) -> bool:
        """The client has something of this request."""
        return self.sent > self.base or self.scored > 0

    def continue_elsewhere(self) -> None:
        """Makes the job what is left of it: its output so far becomes its beginning. Scores come before all tokens."""
        got_tokens = len(self.tokens) // TOKEN > self.base
        self.job = replace(self.job, generated=bytes(self.tokens),
                           prompt_logprobs=None if got_tokens and not self.is_score else self.job.prompt_logprobs)
        self.cost = self.prompt + len(self.tokens) // TOKEN

    def usage(self) -> Usage:
        return Usage(prompt=self.prompt, cached=self.cached,
                     generated=max(self.generated, len(self.tokens) // TOKEN))

    def times(self, now: float) -> Times:
        """Phases that were not reached last no time."""
        assigned = self.assigned_at or now
        first = self.first_at or (now if self.assigned_at else assigned)
        return Times(queue=_ms(assigned - self.arrived), prefill=_ms(first - assigned),
                     decode=_ms(max(0.0, self.last_at - first)) if self.first_at else 0.0)

    def done(self, finish: str, usage: Usage, times: Times) -> Done:
        job, facts = self.job, self.origin.facts
        receipt = None if self.is_score else Receipt(
            model_id=facts.id, fingerprint=facts.fingerprint, seed=job.seed, pinned=job.pinned, window=job.window,
            positions=job.positions, kv_format=facts.kv_format, max_tokens=job.max_tokens)  # fmt: skip
        match = StopMatch(kind=self.match[0], value=self.match[1]) if self.match and finish == "stop" else None
        return Done(finish_reason=finish, stop_match=match, usage=usage, times=times, seed=job.seed,
                    worker=self.slot, receipt=receipt)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
