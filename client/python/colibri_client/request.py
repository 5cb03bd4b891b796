"""One request from its first sending to its end, whatever happens to connections in between. No sockets here.

A request lives in the thread of the client's loop. Another thread may read ``received``, which only grows, and
``outcome``, which is set once; and it may set ``wake`` to be told of either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from colibri_protocol.message import Message
from colibri_protocol.messages import Done, Generate, ModelInfo, Receipt, Resume, Score, TokensOut
from colibri_protocol.messages import Scores as ScoresMessage

from .errors import ColibriError, ConnectionLost
from .results import Alternatives, Completion, Scores, Token, bytes_of, ids_of, read_scores, read_tokens


class Violation(Exception):  # noqa: N818
    """The server sent what it may not. Ends in ProtocolViolation."""


class Request:
    """Base: a question with one message as its answer. ``outcome``: the result, or the ColibriError."""

    tokens: list[Token] | tuple[()] = ()  # what has arrived, for errors
    limited = True  # counts as a live request of the connection

    def __init__(self, message: Message, answer: type[Message] | None = None) -> None:
        self.message, self.answer = message, answer
        self.outcome: Any = None
        self.wake: Callable[[], object] | None = None  # called once, at the next progress or at the end
        self.id = 0  # on the connection that it is on, or was on last
        self.link: Any = None  # that connection, while it is on one
        self.submitted = 0.0  # in the loop's time
        self.attempts, self.losses, self.first_loss = 0, 0, 0.0  # for Policy
        self.error: ColibriError | None = None  # why it is being retried
        self.progressed = False  # since it was last sent
        self.cancelled = False
        self.timer: asyncio.TimerHandle | None = None  # the caller's timeout

    def opening(self, waited_ms: int) -> Message:
        """What to send to start or to go on."""
        return self.message

    def credit(self, window: int) -> int:
        """Tokens to be granted at once, beyond the window that the server grants by itself."""
        return 0

    def take(self, message: Message) -> bool:
        """Digests a message from the server; whether it was the last one."""
        if type(message) is not self.answer:
            raise Violation(f"{message.NAME} in answer to {self.message.NAME}")
        self.finish(message)
        return True

    def finish(self, outcome: Any) -> None:
        """Ends the request; the first call counts."""
        if self.outcome is None:
            self.outcome = outcome
            if self.timer is not None:
                self.timer.cancel()
            self.tell()

    def tell(self) -> None:
        wake, self.wake = self.wake, None
        if wake is not None:
            wake()

    def aborted(self) -> Any:
        """The outcome of a request that was cancelled and can no longer be told by the server how it ended."""
        return ConnectionLost("the connection was lost after the request had been cancelled", self.tokens)


class Question(Request):
    """About the daemon, not for a worker: it never waits for room."""

    limited = False


class Scored(Request):
    """What SCORES bring, in frames of consecutive positions."""

    first = 1  # position of the first

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self.logprobs: list[float] = []
        self.top: list[Alternatives] = []

    def restart_scores(self) -> None:
        self.logprobs, self.top = [], []

    def take_scores(self, message: ScoresMessage) -> None:
        expected = self.first + len(self.logprobs)
        if message.index != expected:
            raise Violation(f"SCORES of position {message.index}; {expected} is next")
        try:
            logprobs, top = read_scores(message)
        except ValueError as e:
            raise Violation(f"SCORES with {e}") from None
        self.logprobs += logprobs
        self.top += top
        self.progressed = True


class Scoring(Scored):
    """SCORE."""

    def __init__(self, message: Score) -> None:
        super().__init__(message)
        self.first = message.start

    def opening(self, waited_ms: int) -> Message:
        self.restart_scores()
        return _within_deadline(self.message, waited_ms)

    def take(self, message: Message) -> bool:
        if isinstance(message, ScoresMessage):
            self.take_scores(message)
            return False
        if not isinstance(message, Done):
            raise Violation(f"{message.NAME} in answer to SCORE")
        self.finish(Scores(self.logprobs, self.top, self.first, message.usage, message.times))
        return True


class Output(Scored):
    """GENERATE. ``streaming``: progress is told, and credit is granted as the reader takes tokens; else only the end is
    told, and all credit is granted at once."""

    def __init__(self, message: Generate, streaming: bool) -> None:
        super().__init__(message)
        self.generate, self.streaming = message, streaming
        given = message.resume.tokens if message.resume else b""
        self.received: list[Token] = [Token(i) for i in ids_of(given)]
        for index, token in enumerate(self.received):
            token.index = index
        self.given = len(self.received)
        self.granted_from = self.given  # tokens read from here on have not been granted anew
        self.step = 1  # tokens read that are worth a CREDIT
        self.origin: ModelInfo | None = None  # what makes the tokens

    @property
    def tokens(self) -> list[Token]:  # type: ignore[override]
        return self.received

    def opening(self, waited_ms: int) -> Message:
        self.granted_from = len(self.received)
        message = _within_deadline(self.generate, waited_ms)
        if self.granted_from == self.given:
            self.origin = None
            self.restart_scores()
            return message
        seed, given = self.generate.seed or 0, self.generate.resume
        receipt = given.receipt if given is not None else None
        if receipt is None and self.origin is not None:
            receipt = _receipt(self.origin, seed)
        resume = Resume(tokens=bytes_of(self.received), seed=seed, receipt=receipt)
        return replace(message, resume=resume, prompt_logprobs=None)

    def credit(self, window: int) -> int:
        self.step = max(1, window // 2)
        left = self.generate.max_tokens - len(self.received)
        return 0 if self.streaming else max(0, left - window)

    def regrant(self, position: int) -> int:
        """Tokens to be granted when the reader has come to position. Those of an earlier connection, which opening()
        has skipped, are not: the server's first window on this one stands for them."""
        more = position - self.granted_from
        self.granted_from = max(self.granted_from, position)
        return more

    def take(self, message: Message) -> bool:
        if isinstance(message, TokensOut):
            self._take_tokens(message)
            return False
        if isinstance(message, ScoresMessage) and self.generate.prompt_logprobs is not None:
            self.take_scores(message)
            return False
        if not isinstance(message, Done):
            raise Violation(f"{message.NAME} in answer to GENERATE")
        self.finish(self._completion(message))
        return True

    def _take_tokens(self, message: TokensOut) -> None:
        received = self.received
        if message.index != len(received):
            raise Violation(f"TOKENS of index {message.index}; {len(received)} is next")
        try:
            received += read_tokens(message, message.index)
        except ValueError as e:
            raise Violation(f"TOKENS with {e}") from None
        if self.origin is None and self.link is not None:
            self.origin = self.link.models.get(message.generation, self.link.model)
        self.progressed = True
        if self.streaming:
            self.tell()

    def _completion(self, done: Done) -> Completion:
        scores = None
        if self.generate.prompt_logprobs is not None:
            scores = Scores(self.logprobs, self.top, self.first, done.usage, done.times)
        return Completion(self.received, done.finish_reason, done.stop_match, done.usage, done.times, done.seed,
                          done.worker, done.receipt, scores)

    def aborted(self) -> Any:
        return Completion(self.received, "abort", seed=self.generate.seed or 0)


def _receipt(model: ModelInfo, seed: int) -> Receipt:
    """What tokens are a function of, besides the request: a daemon that cannot have made them refuses to go on."""
    return Receipt(model_id=model.id, fingerprint=model.fingerprint, seed=seed, pinned=model.pinned,
                   window=model.window, positions=model.positions, kv_format=model.kv_format)


def _within_deadline(message: Any, waited_ms: int) -> Any:
    """The deadline counts from the receipt of the message; what has been waited is taken off if it matters."""
    if waited_ms * 1000 < message.deadline_ms:
        return message
    return replace(message, deadline_ms=max(1, message.deadline_ms - waited_ms))
