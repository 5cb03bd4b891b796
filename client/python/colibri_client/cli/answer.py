"""One request from its prompt to its end: tokens become text as they come, stop strings and Ctrl-C cancel it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from colibri_protocol.messages import Generate, ModelInfo

from ..errors import ColibriError
from ..options import generate_message
from ..results import Completion, Token
from ..sync import Client, Stream
from ..text import Detokenizer, StopStrings, TextError, Tokenizer

Emit = Callable[[Token | None, str], None]
"""Told each token with the text that it released, and at the end None with the rest of the text. After an error only if
there were tokens."""


@dataclass
class Clock:
    """When things happened, in seconds on a monotonic clock, as the client saw it."""

    sent: float = field(default_factory=time.monotonic)
    first: float = 0.0
    last: float = 0.0

    def tick(self) -> None:
        self.last = time.monotonic()
        self.first = self.first or self.last

    @property
    def to_first(self) -> float:
        """Seconds from sending to the first token, 0 if there was none."""
        return self.first - self.sent if self.first else 0.0

    def rate(self, tokens: int, decode_ms: float) -> float | None:
        """Tokens a second after the first; None if there is nothing to measure. decode_ms is the daemon's time for
        them, which counts where they came faster than they were read; after a lost connection it has only a part."""
        seconds = max(self.last - self.first, decode_ms / 1000)
        return (tokens - 1) / seconds if tokens > 1 and seconds > 0 else None


@dataclass
class Answer:
    """tokens: what counts as the output: up to the one that completed a stop string. text: None without a tokenizer.
    stopped: index of the stop string. interrupted: by Ctrl-C."""

    model: ModelInfo
    message: Generate
    stops: Sequence[str]
    tokens: list[Token]
    text: str | None
    clock: Clock
    completion: Completion
    stopped: int | None = None
    interrupted: bool = False

    @property
    def rate(self) -> float | None:
        """Tokens a second."""
        return self.clock.rate(len(self.tokens), self.completion.times.decode)

    @property
    def finish_reason(self) -> str:
        return "stop" if self.stopped is not None else self.completion.finish_reason


class Decoder:
    """Tokens to text up to a stop string; without a tokenizer there is no text."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]) -> None:
        if tokenizer is None and stops:
            raise TextError("stop strings need the model's tokenizer: pass --model DIR, or use --stop-tokens")
        self._stream = Detokenizer(tokenizer) if tokenizer else None
        self._stops = StopStrings(stops)
        self._pieces: list[str] = []

    def push(self, token: int) -> str:
        return self._keep(self._stops.push(self._stream.push(token))) if self._stream else ""

    def finish(self) -> str:
        if self._stream is None:
            return ""
        piece = self._stops.push(self._stream.finish())
        return self._keep(piece + self._stops.finish())

    def _keep(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece

    @property
    def stopped(self) -> int | None:
        return self._stops.match

    @property
    def text(self) -> str | None:
        return "".join(self._pieces) if self._stream else None


def ask(client: Client, prompt: Sequence[int], fields: dict[str, Any], tokenizer: Tokenizer | None,
        stops: Sequence[str], emit: Emit) -> Answer:
    """Sends the request and reads it to its end. On an error emit has had what came before it."""
    fields, texts = split_stops(fields, tokenizer, stops)
    message = generate_message(prompt, fields)
    decoder, clock, model = Decoder(tokenizer, texts), Clock(), client.model
    # The seed of `message`, which the client would otherwise draw once more.
    with client.generate(message.tokens, **{**fields, "seed": message.seed}) as stream:
        tokens: list[Token] = []
        with cancelled_by_ctrl_c(stream) as interrupts:
            try:
                _read(stream, decoder, clock, tokens, emit)
            except ColibriError:
                if tokens:
                    emit(None, decoder.finish())
                raise
        emit(None, decoder.finish())
        done = stream.result
        interrupted = bool(interrupts) and done.finish_reason == "abort" and decoder.stopped is None
        return Answer(model, message, texts, tokens, decoder.text, clock, done, decoder.stopped, interrupted)


def _read(stream: Stream, decoder: Decoder, clock: Clock, tokens: list[Token], emit: Emit) -> None:
    for token in stream:
        if decoder.stopped is not None:
            continue  # it was on its way when the request was cancelled
        clock.tick()
        tokens.append(token)
        emit(token, decoder.push(token))
        if decoder.stopped is not None:
            stream.cancel()


def split_stops(fields: dict[str, Any], tokenizer: Tokenizer | None,
                stops: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Stop strings that name a special token become stop_ids: such a token has no text that could be matched."""
    special = tokenizer.special if tokenizer else {}
    ids = [special[stop] for stop in stops if stop in special]
    if ids:
        fields = {**fields, "stop_ids": [*fields.get("stop_ids", ()), *ids]}
    return fields, [stop for stop in stops if stop not in special]


def with_turn_end(fields: dict[str, Any], tokenizer: Tokenizer, model: ModelInfo) -> dict[str, Any]:
    """For a chat: the tokenizer's own end token ends the answer too, where the model's settings forget it."""
    if tokenizer.eos_id is None or tokenizer.eos_id in model.eos_ids or fields.get("ignore_eos"):
        return fields
    return {**fields, "stop_ids": [*fields.get("stop_ids", ()), tokenizer.eos_id]}


@contextmanager
def cancelled_by_ctrl_c(stream: Stream) -> Iterator[list[int]]:
    """The first Ctrl-C cancels the request, which the daemon still answers; the second gives up at once. The list has
    an entry once it happened."""
    happened: list[int] = []

    def on_interrupt(number: int, frame: object) -> None:
        if happened:
            raise KeyboardInterrupt
        happened.append(number)
        stream.cancel()

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield happened
    finally:
        signal.signal(signal.SIGINT, previous)
