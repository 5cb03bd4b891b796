"""What calls return: tokens, completions, scores; and how they are read from messages."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import overload

from colibri_protocol.messages import Receipt, StopMatch, Times, TokensOut, Usage
from colibri_protocol.messages import Scores as ScoresMessage

LOWEST = -9999.0  # minus infinity on the wire
Alternatives = tuple[tuple[int, float], ...]


class Token(int):
    """A generated token: its id, as an int, and where it stands.

    ``index``: place in the output, from 0. ``logprob``: its log probability, or None if ``logprobs`` was not asked
    for. ``top``: the best alternatives as (id, log probability), best first.
    """

    index: int = 0
    logprob: float | None = None
    top: Alternatives = ()


@dataclass(frozen=True)
class Scores:
    """Log probabilities of consecutive tokens of a text; behaves as the sequence of them.

    ``start``: position of the first. ``top``: per token, the best alternatives as (id, log probability).
    ``usage`` and ``times`` are those of a SCORE request.
    """

    logprobs: list[float]
    top: list[Alternatives]
    start: int = 1
    usage: Usage = Usage()
    times: Times = Times()

    def __len__(self) -> int:
        return len(self.logprobs)

    def __iter__(self) -> Iterator[float]:
        return iter(self.logprobs)

    @overload
    def __getitem__(self, index: int) -> float: ...

    @overload
    def __getitem__(self, index: slice) -> list[float]: ...

    def __getitem__(self, index: int | slice) -> float | list[float]:
        return self.logprobs[index]


@dataclass(frozen=True)
class Completion:
    """A finished output.

    ``tokens``: all of it, tokens given in ``resume`` included. ``finish_reason``: stop, length, abort or deadline;
    ``stop_match`` says what stopped it. ``receipt``: what the output is a function of. ``prompt_scores``: with
    ``prompt_logprobs``. ``times`` are those of the last attempt, in ms.
    """

    tokens: list[Token]
    finish_reason: str
    stop_match: StopMatch | None = None
    usage: Usage = Usage()
    times: Times = Times()
    seed: int = 0
    worker: int | None = None
    receipt: Receipt | None = None
    prompt_scores: Scores | None = None


def ids_of(data: bytes) -> tuple[int, ...]:
    """Token ids of a bin field."""
    return struct.unpack(f"<{len(data) // 4}I", data)


def bytes_of(tokens: list[Token]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def floats_of(data: bytes) -> list[float]:
    """Log probabilities of a bin field."""
    return [x if x > LOWEST else -math.inf for x in struct.unpack(f"<{len(data) // 4}f", data)]


def read_tokens(message: TokensOut, index: int) -> list[Token]:
    """The tokens of a TOKENS message, the first of them at ``index``. ValueError if its arrays do not fit together."""
    data = message.ids
    if len(data) == 4 and message.logprobs is None:  # nearly all messages of a stream
        token = Token(int.from_bytes(data, "little"))
        token.index = index
        return [token]
    tokens = [Token(i) for i in ids_of(data)]
    for place, token in enumerate(tokens, index):
        token.index = place
    if message.logprobs is not None:
        logprobs = floats_of(message.logprobs)
        for token, logprob, top in zip(tokens, logprobs, _tops(message, len(tokens)), strict=True):
            token.logprob, token.top = logprob, top
    return tokens


def read_scores(message: ScoresMessage) -> tuple[list[float], list[Alternatives]]:
    """The content of a SCORES message. ValueError if its arrays do not fit together."""
    logprobs = floats_of(message.logprobs)
    return logprobs, _tops(message, len(logprobs))


def _tops(message: TokensOut | ScoresMessage, rows: int) -> list[Alternatives]:
    ids, logprobs = ids_of(message.top_ids or b""), floats_of(message.top_logprobs or b"")
    if len(ids) != len(logprobs) or (rows == 0 and ids) or (rows and len(ids) % rows):
        raise ValueError(f"{len(ids)} alternatives with {len(logprobs)} log probabilities for {rows} tokens")
    width = len(ids) // rows if rows else 0
    return [tuple(zip(ids[r * width : (r + 1) * width], logprobs[r * width : (r + 1) * width], strict=True))
            for r in range(rows)]
