"""A job in this worker: its lane in the engine, and what of its output the dispatcher has been told.

Rows are as common/ipc.py describes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from colibri_engine._colibri import lib
from colibri_engine.batch import Drawn, Failed, Lane, Outcome, Scored, Scoring
from colibri_engine.binding import POSITIONS, Sampling, choice
from colibri_engine.runtime import Info
from colibri_engine.sequence import Attention
from colibri_protocol.errors import Code

from ..common.job import Job
from .stops import Stops

Row = list[Any]  # [key, ids, details or None]

# colibri_status_t of a failed lane -> what the client is told; others are faults of ours
_CODES = {
    lib.COLIBRI_NON_FINITE: Code.NON_FINITE,
    lib.COLIBRI_INVALID_ARGUMENT: Code.INVALID_ARGUMENT,
    lib.COLIBRI_TOKEN_RANGE: Code.INVALID_ARGUMENT,  # of logit_bias; texts are checked before
    lib.COLIBRI_NO_TOKEN: Code.INVALID_ARGUMENT,
}
MOST_DOUBTS = 2
_MINUS_INFINITY = b"\x00\x00\x80\xff"  # as f32; travels as -9999


class Request:
    """finished: nothing is left to be computed; the row made last, or that of end(), is the last. attached: its lane
    has its place in the KV cache. paused: it is to stay out of the batch, but not before it is at goal: others may
    wait for what it computes of the text that it was attached with. arrival: grows from request to request. doubts: how
    often what it was computed from was doubted."""

    def __init__(self, key: int, job: Job, info: Info, max_length: int, arrival: int = 0) -> None:
        """ValueError if the job cannot be run by this model, naming what is wrong."""
        prompt, generated = (np.frombuffer(ids, "<u4") for ids in (job.tokens, job.generated))
        if not len(prompt) or len(prompt) + job.max_tokens > max_length:
            raise ValueError(f"prompt and output have {len(prompt)} + {job.max_tokens} tokens; at least 1 + 0 and at "
                             f"most {max_length} together are possible")
        self.key, self.arrival, self.salt, self.cache, self.owner = key, arrival, job.salt, job.cache, job.owner
        self._names = {"trace": job.trace, "request_id": job.request_id}
        self.attached = self.paused = False
        self.doubts = 0
        self._logprobs, self._min_tokens = job.logprobs, job.min_tokens
        self.stops = _stops(job, generated)
        draws = self.stops.finish is None
        self.lane = Lane(info, prompt, job.max_tokens if draws else 0, _attention(job), _sampling(job),
                         generated if draws else None, _scoring(job, len(prompt)), key)
        self.goal = self.lane.target
        self.finished = not draws and not self.lane.target
        self._sent = len(generated)
        self._extras: list[Drawn] = []  # of tokens not sent yet, if log probabilities are wanted
        self._cached = 0  # prompt tokens found in the prefix cache, not told yet
        self._begun = False
        if barred := self.stops.barred:
            self.lane.bar(np.array(barred, np.uint32))

    @property
    def about(self) -> dict[str, Any]:
        """For the log: whose it is, in the dispatcher's words and its client's, and how far it came."""
        names = {name: value for name, value in self._names.items() if value is not None}
        return {"key": self.key, **names, "prompt": self.lane.n_prompt, "computed": self.lane.position,
                "generated": self.stops.count, "finish": self.stops.finish}

    def begin(self, cached: int) -> None:
        """The lane has its place, behind so many tokens that were in the cache."""
        if not self._begun:
            self._cached = min(cached, self.lane.n_prompt)
        self.attached = self._begun = True

    def rewind(self) -> None:
        """What was computed is lost; the text, and what was told of it, is not."""
        self.lane.rewind()
        self.attached, self.goal = False, self.lane.target

    @property
    def is_held_back(self) -> bool:
        return self.paused and self.attached and self.lane.position >= self.goal

    def doubt(self, outcome: Outcome) -> bool:
        """Whether to compute it again before this outcome is believed: keys and values that another process has damaged
        give NaN too, and that may not be known yet. PoolKv.attach_again() says how."""
        if not isinstance(outcome, Failed) or outcome.status != lib.COLIBRI_NON_FINITE or self.doubts == MOST_DOUBTS:
            return False
        self.doubts += 1
        return True

    def take(self, outcome: Outcome) -> Row | None:
        """The row for what a step gave; None if there is nothing to tell."""
        if isinstance(outcome, Drawn):
            return self._drawn(outcome)
        if isinstance(outcome, Scored):
            return self._scored(outcome)
        if isinstance(outcome, Failed):
            return self.fail(_CODES.get(outcome.status, Code.INTERNAL), outcome.message)
        return None

    def end(self, finish: str | None = None) -> Row:
        """The last row, with what was held back. finish: why, if the request does not end by itself."""
        if finish is not None:
            self.stops.end(finish)
        self.finished = True
        return self._row({})

    def preempt(self) -> Row:
        """The last row here of one that goes on elsewhere, from what was sent: what was held back is found again."""
        self.stops.finish, self.finished = "preempted", True
        return self._row({})

    def fail(self, code: Code, message: str) -> Row:
        self.finished = True
        return failed(self.key, code, message, self.stops.count)

    def _drawn(self, drawn: Drawn) -> Row | None:
        stops = self.stops
        stops.push(drawn.token)
        if stops.count == self._min_tokens:
            self.lane.lift()
        if self._logprobs is not None:
            self._extras.append(drawn)
        self.finished = stops.finish is not None
        return self._row({}) if self.finished or stops.released > self._sent else None

    def _scored(self, scored: Scored) -> Row:
        self.finished = self.stops.finish is not None and self.lane.position == self.lane.target
        top = [scored.top_ids, finite(scored.top_logprobs)] if scored.top_ids else [None, None]
        return self._row({"scores": [scored.first, finite(scored.logprobs), *top]})

    def _row(self, details: dict[str, Any]) -> Row:
        """details, and whatever else may be told and has not been."""
        count = self.stops.released - self._sent
        start = self.lane.n_prompt + self._sent
        self._sent += count
        if self._cached:
            details["cached"], self._cached = self._cached, 0
        if count and self._logprobs is not None:
            details |= self._log_probabilities(count)
        if self.finished:
            details |= self._ending()
        return [self.key, self.lane.tokens[start : start + count].tobytes(), details or None]

    def _log_probabilities(self, count: int) -> dict[str, bytes]:
        extras, self._extras = self._extras[:count], self._extras[count:]
        found = {"lp": finite(np.array([extra.logprob for extra in extras], "<f4").tobytes())}
        if self._logprobs:
            found["top"] = b"".join(extra.top_ids for extra in extras)
            found["toplp"] = finite(b"".join(extra.top_logprobs for extra in extras))
        return found

    def _ending(self) -> dict[str, Any]:
        ending: dict[str, Any] = {"finish": self.stops.finish, "generated": self.stops.count}
        if self.stops.finish == "stop" and (match := self.stops.match):
            ending["match"] = [match.kind, match.value]
        return ending


def failed(key: int, code: Code, message: str, generated: int) -> Row:
    """The last row of a request that cannot go on."""
    return [key, b"", {"finish": "error", "error": [int(code), message], "generated": generated}]


def finite(values: bytes) -> bytes:
    """f32 values as they travel: -9999 for minus infinity."""
    if _MINUS_INFINITY not in values:
        return values
    floats = np.frombuffer(values, "<f4")
    return np.where(np.isneginf(floats), np.float32(-9999.0), floats).tobytes()


def _ids(tokens: bytes) -> list[int]:
    return np.frombuffer(tokens, "<u4").tolist()


def _stops(job: Job, generated: np.ndarray) -> Stops:
    stops = Stops(job.max_tokens, job.min_tokens, _ids(job.eos_ids), _ids(job.stop_ids), [*map(_ids, job.stop_seqs)])
    if len(generated):
        stops.restore(generated.tolist())
    return stops


def _attention(job: Job) -> Attention:
    if job.pinned and not job.window:
        raise ValueError(f"pinned is {job.pinned} but window is 0 (full attention)")
    return Attention(job.pinned, job.window, choice(POSITIONS, job.positions, "positions"))


def _sampling(job: Job) -> Sampling:
    return Sampling(logit_bias=job.logit_bias, repetition_penalty=job.repetition_penalty,
                    presence_penalty=job.presence_penalty, frequency_penalty=job.frequency_penalty,
                    temperature=job.temperature, top_k=job.top_k, top_p=job.top_p, min_p=job.min_p, seed=job.seed,
                    logprobs=job.logprobs)


def _scoring(job: Job, length: int) -> Scoring | None:
    """A score job's, or prompt log probabilities."""
    if job.score_from is None and job.prompt_logprobs is None:
        return None
    first = 1 if job.score_from is None else job.score_from
    if not 1 <= first <= length:
        raise ValueError(f"score_from is {first}; it must be in [1, {length}]")
    return Scoring(first, length, job.prompt_logprobs or 0)
