"""From what callers pass to messages: token ids in any form, the keywords of GENERATE and SCORE, checked locally."""

from __future__ import annotations

import difflib
import operator
import secrets
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypedDict

from colibri_protocol.errors import Code, InvalidMessage
from colibri_protocol.kinds import Tokens
from colibri_protocol.message import Message
from colibri_protocol.messages import Cache, Generate, Resume, Score, TokenCheck

from .errors import InvalidRequest, class_of, from_local

TokenIds = bytes | bytearray | memoryview | Sequence[int] | Iterable[int]
"""Token ids: bytes of little-endian u32, or integers: a list, any iterable, an array of an integer type (numpy)."""


class ScoreOptions(TypedDict, total=False):
    """Keywords of ``score``; what they mean is in the protocol's SPEC.md. None means: not given."""

    priority: int
    deadline_ms: int
    cache: Cache | Mapping[str, Any]
    model: str
    tenant: str
    trace: str
    request_id: str


class CheckOptions(TypedDict, total=False):
    """Keywords of ``token_check``."""

    max_tokens: int
    cache: Cache | Mapping[str, Any]
    model: str
    tenant: str


class GenerateOptions(ScoreOptions, total=False):
    """Keywords of ``generate`` and ``complete``: the fields of GENERATE, as SPEC.md explains them."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop_ids: TokenIds
    stop_seqs: Sequence[TokenIds]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    resume: Resume | Mapping[str, Any]
    echo_usage: bool


def pack(tokens: TokenIds, field: str = "tokens") -> bytes:
    """Token ids as bytes of little-endian u32. InvalidRequest names the entry at fault."""
    if isinstance(tokens, bytes | bytearray):
        return bytes(tokens)
    if isinstance(tokens, list | tuple):
        return _of_list(tokens, field)
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        raise _bad(field, f"{field} is {type(tokens).__name__}; token ids are integers, or bytes of little-endian u32")
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]
    except TypeError:
        return _of_list(list(tokens), field)
    return _of_array(tokens, view, field)


def _of_array(tokens: Any, view: memoryview, field: str) -> bytes:
    """numpy's arrays, array.array and the like, by their buffer."""
    if isinstance(tokens, memoryview) and view.format == "B":
        return view.tobytes()
    if view.ndim != 1:
        raise _bad(field, f"{field} has {view.ndim} dimensions; token ids are a flat array")
    if view.format.lstrip("@=<>") not in tuple("bBhHiIlLqQ"):
        raise _bad(field, f"{field} is an array of type {view.format!r}; token ids are integers")
    if view.format in ("I", "<I") and sys.byteorder == "little":
        return view.tobytes()
    return _of_list(list(tokens), field)


def _of_list(ids: Sequence[Any], field: str) -> bytes:
    try:
        if bool in set(map(type, ids)):
            raise TypeError
        return struct.pack(f"<{len(ids)}I", *ids)
    except (struct.error, TypeError):
        return _checked(ids, field)


def _checked(ids: Sequence[Any], field: str) -> bytes:
    """The slow way, which finds the entry at fault."""
    plain = [entry if isinstance(entry, bool) or not hasattr(entry, "__index__") else operator.index(entry)
             for entry in ids]
    try:
        return Tokens().check(plain, field)
    except InvalidMessage as e:
        raise from_local(e) from None


def _bad(field: str, message: str) -> InvalidRequest:
    return class_of(Code.INVALID_ARGUMENT)(Code.INVALID_ARGUMENT, message, field=field)  # type: ignore[return-value]


# ---- messages ------------------------------------------------------------------------------------------------------


def generate_message(tokens: TokenIds, options: Mapping[str, Any]) -> Generate:
    """GENERATE, with a seed whenever one can matter: a client that knows it can take up a broken stream."""
    body = _body(Generate, tokens, options)
    if "stop_ids" in body:
        body["stop_ids"] = pack(body["stop_ids"], "stop_ids")
    if "stop_seqs" in body:
        body["stop_seqs"] = [pack(s, f"stop_seqs[{i}]") for i, s in enumerate(body["stop_seqs"])]
    if isinstance(body.get("logit_bias"), Mapping):
        body["logit_bias"] = {_index(token): bias for token, bias in body["logit_bias"].items()}
    resume = body.get("resume")
    if isinstance(resume, Mapping):
        body["resume"] = resume = {**resume, "tokens": pack(resume.get("tokens", b""), "resume.tokens")}
    if "seed" not in body and body.get("temperature"):
        body["seed"] = _seed(resume)
    return _checked_message(Generate, body)


def _seed(resume: Any) -> Any:
    """That of the output to be resumed, or a new one."""
    if isinstance(resume, Resume):
        return resume.seed
    return resume.get("seed", 0) if isinstance(resume, dict) else secrets.randbits(64)


def score_message(tokens: TokenIds, top: int, start: int, options: Mapping[str, Any]) -> Score:
    return _checked_message(Score, {**_body(Score, tokens, options), "top": top, "from": start})


def check_message(tokens: TokenIds, options: Mapping[str, Any]) -> TokenCheck:
    return _checked_message(TokenCheck, _body(TokenCheck, tokens, options))


def _body(message: type[Message], tokens: TokenIds, options: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := options.keys() - _known(message):
        name = min(unknown)
        near = difflib.get_close_matches(name, _known(message), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TypeError(f"{message.NAME} has no field {name!r}{hint}")
    return {"tokens": pack(tokens), **{name: value for name, value in options.items() if value is not None}}


@cache
def _known(message: type[Message]) -> frozenset[str]:
    """Names of the fields that are keywords."""
    return frozenset(spec.name for spec in message.SPECS) - {"tokens", "top", "start"}


def _checked_message(message: type[Message], body: dict[str, Any]) -> Any:
    if not body["tokens"]:
        raise class_of(Code.PROMPT_EMPTY)(Code.PROMPT_EMPTY, "tokens is empty; give at least one token id",
                                          field="tokens")
    try:
        return message.from_body(body)
    except InvalidMessage as e:
        raise from_local(e) from None


def _index(token: Any) -> Any:
    return token if isinstance(token, bool) or not hasattr(token, "__index__") else operator.index(token)
