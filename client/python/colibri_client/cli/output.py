"""How answers look: text, ids, rows, JSON, and the summary line."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import click
from colibri_protocol.message import Struct
from colibri_protocol.messages import Generate

from ..results import LOWEST, Alternatives, Scores, Token, ids_of
from ..text import Tokenizer
from .answer import Answer

# What the output is a function of, besides model and daemon; replay sends these again.
RECORDED = ("tokens", "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
            "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop_ids", "stop_seqs", "ignore_eos")


def plain(value: Any) -> Any:
    """A protocol struct as JSON can hold it; every field is there."""
    if isinstance(value, Struct):
        return {spec.name: plain(getattr(value, spec.name)) for spec in value.SPECS}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    return number(value) if isinstance(value, float) else value


def number(x: float) -> float:
    """JSON has no infinity: as on the wire."""
    return LOWEST if x == -math.inf else x


def dump(body: dict[str, Any]) -> None:
    """One line, at once."""
    click.echo(json.dumps(body, ensure_ascii=False, allow_nan=False))


# ---- streams: each is told (token, released text), and (None, last text) at the end ----------------------------------


class TextStream:
    """The text as it comes, ended by a newline. On a terminal without control characters, which could change it."""

    CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

    def __init__(self) -> None:
        self._harmless = {} if not sys.stdout.isatty() else self.CONTROLS

    def __call__(self, token: Token | None, piece: str) -> None:
        click.echo(piece.translate(self._harmless), nl=token is None)


class IdStream:
    """Token ids between spaces, on one line."""

    def __call__(self, token: Token | None, piece: str) -> None:
        click.echo("" if token is None else f"{' ' if token.index else ''}{int(token)}", nl=token is None)


class RowStream:
    """A line a token: index, id, log probability, text, alternatives; between tabs."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token: Token | None, piece: str) -> None:
        if token is not None:
            click.echo(row(token.index, token, token.logprob, token.top, self._tokenizer))


class JsonStream:
    """NDJSON: {"type": "token"} each, {"type": "text"} for text that came free at the end."""

    def __call__(self, token: Token | None, piece: str) -> None:
        if token is None:
            if piece:
                dump({"type": "text", "text": piece})
            return
        body: dict[str, Any] = {"type": "token", "index": token.index, "id": int(token), "text": piece}
        if token.logprob is not None:
            body |= {"logprob": number(token.logprob), "top": top_list(token.top)}
        dump(body)


def silent(token: Token | None, piece: str) -> None:
    """For output that is printed when it is complete."""


def top_list(top: Alternatives) -> list[list[float]]:
    return [[id, number(logprob)] for id, logprob in top]


def row(position: int, id: int, logprob: float | None, top: Alternatives, tokenizer: Tokenizer | None) -> str:
    """One token for people and for awk."""
    columns = [str(position), str(int(id)), "" if logprob is None else f"{logprob:.4f}", shown(id, tokenizer)]
    return "\t".join([*columns, *(f"{shown(i, tokenizer) or i}:{p:.4f}" for i, p in top)])


def shown(id: int, tokenizer: Tokenizer | None) -> str:
    """A token's text in quotes, so that spaces can be seen and control characters do nothing."""
    return json.dumps(tokenizer.name(int(id)), ensure_ascii=False) if tokenizer else ""


# ---- the whole answer ----------------------------------------------------------------------------------------------


def answer_body(answer: Answer) -> dict[str, Any]:
    """What --json prints and replay reads."""
    completion, tokens = answer.completion, answer.tokens
    body: dict[str, Any] = {
        "model": answer.model.name,
        "text": answer.text,
        "tokens": [int(token) for token in tokens],
        "finish_reason": answer.finish_reason,
        "stop_match": _stop_match(answer),
        "usage": plain(completion.usage),
        "times_ms": plain(completion.times),
        "first_token_s": round(answer.clock.to_first, 6),
        "tokens_per_s": answer.rate,
        "seed": completion.seed,
        "worker": completion.worker,
        "request": recorded(answer.message, answer),
        "receipt": plain(completion.receipt),
    }
    if answer.message.logprobs is not None:
        body["logprobs"] = [number(t.logprob) for t in tokens if t.logprob is not None]
        body["top"] = [top_list(t.top) for t in tokens]
    if completion.prompt_scores is not None:
        body["prompt_scores"] = scores_body(completion.prompt_scores)
    return body


def recorded(message: Generate, answer: Answer) -> dict[str, Any]:
    """The effective request: what was asked for, with the seed and the max_tokens that the daemon used."""
    body = {name: plain(getattr(message, name)) for name in RECORDED}
    body |= {"tokens": list(ids_of(message.tokens)), "stop_ids": list(ids_of(message.stop_ids)),
             "stop_seqs": [list(ids_of(sequence)) for sequence in message.stop_seqs],
             "seed": answer.completion.seed, "stop": list(answer.stops)}
    receipt = answer.completion.receipt
    return {**body, "max_tokens": receipt.max_tokens} if receipt else body


def _stop_match(answer: Answer) -> dict[str, Any] | None:
    if answer.stopped is not None:
        return {"kind": "text", "value": answer.stopped}
    return plain(answer.completion.stop_match)


def scores_body(scores: Scores) -> dict[str, Any]:
    return {"start": scores.start, "logprobs": [number(p) for p in scores], "top": [top_list(t) for t in scores.top]}


def summary(answer: Answer) -> str:
    """One line for people."""
    count, rate, usage = len(answer.tokens), answer.rate, answer.completion.usage
    parts = [f"{count} token{'' if count == 1 else 's'}"]
    if count:
        parts.append(f"first after {answer.clock.to_first:.2f} s")
    if rate is not None:
        parts.append(f"{rate:.1f} tokens/s")
    if usage.cached:
        parts.append(f"{usage.cached} of {usage.prompt} prompt tokens from the cache")
    return " · ".join([*parts, _ending(answer)])


def _ending(answer: Answer) -> str:
    if answer.interrupted:
        return "cancelled by Ctrl-C"
    if answer.stopped is not None:
        return f"stop ({json.dumps(answer.stops[answer.stopped], ensure_ascii=False)})"
    match = answer.completion.stop_match
    return f"{answer.finish_reason} ({match.kind} {match.value})" if match else answer.finish_reason


def perplexity(logprobs: Sequence[float]) -> float:
    """exp of the mean negative log probability; infinite if a token was impossible, NaN without tokens."""
    try:
        return math.exp(-sum(logprobs) / len(logprobs)) if logprobs else math.nan
    except OverflowError:
        return math.inf
