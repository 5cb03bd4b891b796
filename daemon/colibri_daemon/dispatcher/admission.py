"""What a request becomes before it may wait: every check that needs the model or the configuration. Pure.

Types and ranges of single fields were checked when the message was decoded; here are the rules between fields and those
of the model. Each refusal is an InvalidMessage with the code, the field and the remedy.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colibri_protocol.errors import Code, InvalidMessage
from colibri_protocol.messages import Generate, Resume, Score, TokenCheck

from ..common.facts import ModelFacts
from ..common.job import Job
from ..common.kv import OWNER_BYTES, slabs_needed

TOKEN = 4  # bytes of an id
OVERFLOW_UID = 65534  # whoever has no user id here: many people, who must not share


class Refused(InvalidMessage):
    """A request that is not taken in because of the daemon's state. reason: its label among the metrics."""

    def __init__(self, code: Code, message: str, reason: str, retry_after_ms: int | None = None,
                 limit: int | None = None) -> None:
        super().__init__(code, message, limit=limit)
        self.reason, self.retry_after_ms = reason, retry_after_ms


@dataclass(frozen=True)
class Capacity:
    """KV slabs that one request can have when it is alone, and the largest prefill chunk."""

    slabs: int
    chunk: int


@dataclass(frozen=True)
class Admitted:
    """A request that may run. answer: (finish reason, stop match) if the outcome is known without a worker."""

    job: Job
    answer: tuple[str, tuple[str, int] | None] | None = None


class Admission:
    """The rules for one model and configuration. capacity: None until a worker has reported; then requests that can
    never fit are refused, before that they wait."""

    def __init__(self, facts: ModelFacts, trusted_uids: frozenset[int], draw_seed: Callable[[], int]) -> None:
        self._facts, self._trusted, self._draw_seed = facts, trusted_uids, draw_seed
        self._eos = array("I", facts.eos_ids).tobytes()
        self.capacity: Capacity | None = None

    @property
    def slab_tokens(self) -> int:
        return self._facts.slab_tokens

    def generate(self, message: Generate, uid: int) -> Admitted:
        self._check_peer(message, uid)
        self._check_prompt(message.tokens, 1 if message.max_tokens else 0)
        self._check_stops(message)
        most = self._clip(message.tokens, message.max_tokens)
        generated, seed = self._check_resume(message, most)
        self._check_ids(message)
        job = Job(
            tokens=message.tokens, max_tokens=most, min_tokens=message.min_tokens, temperature=message.temperature,
            top_k=message.top_k, top_p=message.top_p, min_p=message.min_p,
            repetition_penalty=message.repetition_penalty, presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty, logit_bias=message.logit_bias, seed=seed,
            stop_ids=message.stop_ids, eos_ids=b"" if message.ignore_eos else self._eos, stop_seqs=message.stop_seqs,
            logprobs=message.logprobs, prompt_logprobs=message.prompt_logprobs, generated=generated,
            **self._kv(message, uid) | self._as_before(message.resume, len(message.tokens) // TOKEN + most),
        )  # fmt: skip
        self._fit(len(message.tokens) // TOKEN + most, job)
        return Admitted(job, foregone(job))

    def score(self, message: Score, uid: int) -> Admitted:
        self._check_peer(message, uid)
        self._check_prompt(message.tokens, 0)
        count = len(message.tokens) // TOKEN
        if message.start >= count:
            raise refused(f"from is {message.start}; it must be below the number of tokens, {count}", "from",
                          limit=count - 1)
        job = Job(tokens=message.tokens, prompt_logprobs=message.top, score_from=message.start,
                  **self._kv(message, uid))
        self._fit(count, job)
        return Admitted(job)

    def check(self, message: TokenCheck, uid: int) -> tuple[Job, int]:
        """A job with the max_tokens and the KV cache that GENERATE would get, and the slabs needed at most."""
        self._check_peer(message, uid)
        self._check_prompt(message.tokens, 1 if message.max_tokens else 0)
        most = self._clip(message.tokens, message.max_tokens)
        job = Job(tokens=message.tokens, max_tokens=most, **self._kv(message, uid))
        return job, self._fit(len(message.tokens) // TOKEN + most, job)

    def _kv(self, message: Generate | Score | TokenCheck, uid: int) -> dict[str, Any]:
        """Fields of Job: what the request attends to, with whom it shares what is computed, and whose share it is."""
        salt = salt_of(uid, message.tenant, message.cache.salt_extra)
        return {"pinned": self._facts.pinned, "window": self._facts.window, "positions": self._facts.positions,
                "salt": salt, "cache": bool(salt) and message.cache.use,
                "owner": zlib.crc32(f"{uid} {message.tenant!r}".encode()),
                "trace": getattr(message, "trace", None),
                "request_id": getattr(message, "request_id", None)}  # fmt: skip

    def _as_before(self, resume: Resume | None, length: int) -> dict[str, Any]:
        """Fields of Job that were fixed where the request was admitted first, whatever the configuration is now."""
        if resume is None or resume.receipt is None:
            return {}
        pinned, window, positions = resume.receipt.pinned, resume.receipt.window, resume.receipt.positions
        context = self._facts.context
        whole = length <= context and not pinned if not window else pinned + window <= context
        if not whole and not (window and positions == "absolute") or positions not in ("cache", "absolute"):
            raise refused("the attention of resume.receipt is none that this model can have had", "resume.receipt")
        return {"pinned": pinned, "window": window, "positions": positions}

    def _check_peer(self, message: Generate | Score | TokenCheck, uid: int) -> None:
        if message.model is not None and message.model != self._facts.name:
            raise InvalidMessage(Code.MODEL_MISMATCH, f"model is {message.model!r}; {self._facts.name!r} is served",
                                 "model")
        if message.tenant is not None and uid not in self._trusted:
            raise InvalidMessage(Code.PERMISSION, f"user {uid} may not name a tenant; leave tenant out, or add the "
                                 "user to trusted_uids", "tenant")

    def _check_prompt(self, tokens: bytes, room: int) -> None:
        """room: tokens of output that must fit behind it."""
        if not tokens:
            raise InvalidMessage(Code.PROMPT_EMPTY, "tokens is empty; send at least one", "tokens")
        count, most = len(tokens) // TOKEN, self._facts.max_len - room
        if count > most:
            raise InvalidMessage(Code.PROMPT_TOO_LONG, f"tokens has {count} tokens; at most {most} fit", "tokens",
                                 limit=most)
        self._check_vocabulary(tokens, "tokens")

    def _clip(self, tokens: bytes, max_tokens: int) -> int:
        return min(max_tokens, self._facts.max_len - len(tokens) // TOKEN)

    def _check_stops(self, message: Generate) -> None:
        if message.min_tokens > message.max_tokens:
            raise refused(f"min_tokens is {message.min_tokens}; it must be at most max_tokens, {message.max_tokens}",
                          "min_tokens", limit=message.max_tokens)
        for index, sequence in enumerate(message.stop_seqs):
            if not sequence:
                raise refused(f"stop_seqs[{index}] is empty; leave it out", "stop_seqs", index)

    def _check_ids(self, message: Generate) -> None:
        """Every token id but the prompt's."""
        if message.stop_ids:
            self._check_vocabulary(message.stop_ids, "stop_ids")
        for index, sequence in enumerate(message.stop_seqs):
            self._check_vocabulary(sequence, "stop_seqs", index)
        for token in message.logit_bias:
            if token >= self._facts.vocab_size:
                raise self._unknown("logit_bias", token, token)

    def _check_resume(self, message: Generate, most: int) -> tuple[bytes, int]:
        """The output so far and the seed."""
        resume = message.resume
        if resume is None:
            return b"", self._draw_seed() if message.seed is None else message.seed
        if message.seed is not None and message.seed != resume.seed:
            raise refused(f"seed is {message.seed} and resume.seed {resume.seed}; leave seed out", "seed")
        if len(resume.tokens) // TOKEN > most:
            raise refused(f"resume.tokens has {len(resume.tokens) // TOKEN} tokens; at most max_tokens, {most}, are "
                          "possible", "resume.tokens", limit=most)
        self._check_vocabulary(resume.tokens, "resume.tokens")
        return resume.tokens, resume.seed

    def _check_vocabulary(self, tokens: bytes, field: str, entry: int | None = None) -> None:
        """entry: index of tokens in a list field; else the index told is the token's."""
        ids = unpacked(tokens)
        if not ids or max(ids) < self._facts.vocab_size:
            return
        index = next(i for i, token in enumerate(ids) if token >= self._facts.vocab_size)
        raise self._unknown(field, ids[index], index if entry is None else entry)

    def _unknown(self, field: str, token: int, index: int) -> InvalidMessage:
        vocab = self._facts.vocab_size
        return InvalidMessage(Code.TOKEN_OUT_OF_RANGE, f"{field} has the token id {token}; ids are below {vocab}",
                              field, index, vocab - 1)

    def _fit(self, length: int, job: Job) -> int:
        """Slabs needed at most; 0 while no worker has reported its chunk."""
        if self.capacity is None:
            return 0
        need = self.slabs(length, job)
        if need > self.capacity.slabs:
            raise never_fits(need, self.capacity.slabs)
        return need

    def slabs(self, length: int, job: Job) -> int:
        """Most slabs that a request has at once when it has so many tokens. A worker has reported its chunk."""
        assert self.capacity is not None
        return slabs_needed(length, job.pinned, job.window, self.capacity.chunk, self._facts.slab_tokens)


def refused(message: str, field: str, index: int | None = None, limit: int | None = None) -> InvalidMessage:
    return InvalidMessage(Code.INVALID_ARGUMENT, message, field, index, limit)


def never_fits(need: int, have: int) -> InvalidMessage:
    return InvalidMessage(Code.NEVER_FITS, f"needs up to {need} KV slabs, there are {have}; lower max_tokens or "
                          "raise kv_bytes", limit=have)


def salt_of(uid: int, tenant: str | None, extra: bytes) -> bytes:
    """Requests share what is in the KV cache if they have the same salt. Empty: with nobody. The first OWNER_BYTES tell
    whose it is."""
    if uid == OVERFLOW_UID:
        return b""
    return owner_of(uid, tenant) + hashlib.sha256(extra).digest()[:OWNER_BYTES]


def owner_of(uid: int, tenant: str | None) -> bytes:
    name = b"" if tenant is None else b"t" + tenant.encode()
    return hashlib.sha256(struct.pack("<Q", uid) + name).digest()[:OWNER_BYTES]


def unpacked(tokens: bytes) -> array[int]:
    """The ids as numbers. Wire and host are both little-endian; Colibri builds for nothing else."""
    return array("I", tokens)


def foregone(job: Job) -> tuple[str, tuple[str, int] | None] | None:
    """Finish reason and stop match of a job that has nothing left to compute: its output so far already ends it, or
    none was asked for. None if a worker must go on."""
    if job.prompt_logprobs is not None or job.score_from is not None:
        return None
    count = len(job.generated) // TOKEN
    last = job.generated[-TOKEN:]
    if count > job.min_tokens:
        value = int.from_bytes(last, "little")
        for kind, ids in (("eos", job.eos_ids), ("id", job.stop_ids)):
            if value in unpacked(ids):
                return "stop", (kind, value)
    return ("length", None) if count >= job.max_tokens else None
