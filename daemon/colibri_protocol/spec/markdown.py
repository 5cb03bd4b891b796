"""SPEC.md: the prose of SPEC.md.in with tables and examples made from the declarations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING
from pathlib import Path
from string import Template
from typing import Any

import msgpack

from .. import limits
from ..codec import encode
from ..connection import ABOUT_CONNECTION, ABOUT_REQUEST
from ..errors import CODES
from ..framing import HEADER_BYTES
from ..message import IGNORABLE, STRUCTS, Message, Spec, Struct, messages_by_tag
from ..messages import Done, Generate, Hello, StopMatch, TokensOut, Usage

HERE = Path(__file__).parent

# name in limits.py or ServerLimits -> (unit, what it bounds). "configurable" in the text: WELCOME tells the value.
LIMITS: dict[str, tuple[str, str]] = {
    "MAX_FRAME": ("bytes", "payload of a frame, both directions; configurable, WELCOME tells"),
    "FRAME_CEILING": ("bytes", "what that may be configured to"),
    "MAX_DEPTH": ("levels", "nesting of arrays and maps, the message's own array included"),
    "MAX_ARRAY": ("entries", "an array"),
    "MAX_MAP": ("entries", "a map"),
    "MAX_TEXT": ("bytes", "a text"),
    "MAX_ITEMS": ("values", "in one frame"),
    "SCORES_FRAME": ("bytes", "a SCORES frame"),
    "MAX_LOGPROBS": ("", "`logprobs`, `prompt_logprobs` and `top`"),
    "MAX_STOP_IDS": ("tokens", "`stop_ids`"),
    "MAX_STOP_SEQS": ("sequences", "`stop_seqs`"),
    "MAX_STOP_LENGTH": ("tokens", "a sequence in `stop_seqs`"),
    "MAX_PING": ("bytes", "`data` of PING"),
    "DEFAULT_MAX_TOKENS": ("tokens", "output, if GENERATE does not say; at most `max_len` less the prompt"),
    "DEFAULT_DEADLINE_MS": ("ms", "a request, if it does not say"),
    "MAX_DEADLINE_MS": ("ms", "`deadline_ms`"),
    "INITIAL_CREDIT": ("tokens", "a stream before the first CREDIT, with feature credit"),
    "HELLO_SECONDS": ("s", "from connecting to HELLO"),
    "FRAME_SECONDS": ("s", "from the first byte of a frame to its last: READ_TIMEOUT"),
    "PING_SECONDS": ("s", "without a frame before the daemon sends PING"),
    "PINGS_UNANSWERED": ("", "PINGs without a PONG before the connection is closed"),
    "QUEUE_SECONDS": ("s", "in the queue: QUEUE_FULL; configurable"),
    "OUTPUT_SOFT": ("bytes", "unread output of a connection before its requests pause"),
    "OUTPUT_HARD": ("bytes", "unread output of a connection: SLOW_READER"),
    "SLOW_READER_SECONDS": ("s", "unread output without progress: SLOW_READER"),
    "PAUSED_SECONDS": ("s", "without credit before a stream leaves the batch"),
    "connections": ("", "connections of the daemon: TOO_MANY_CONNECTIONS; configurable"),
    "connections_per_uid": ("", "connections of one user; configurable"),
    "requests": ("", "live requests of a connection: TOO_MANY_INFLIGHT; configurable, WELCOME tells"),
    "requests_trusted": ("", "the same for trusted users; configurable"),
    "queue_tokens": ("tokens", "prompts waiting in the queue: QUEUE_FULL; configurable"),
}


def spec_markdown() -> str:
    hello = Hello(proto_min=1, proto_max=1, half_close_ok=True)
    request = Generate(tokens=_ids(1, 2), max_tokens=3)
    tokens = TokensOut(ids=_ids(7, 9), step=41)
    last = TokensOut(ids=_ids(2), index=2, step=42)
    done = Done(finish_reason="stop", stop_match=StopMatch(kind="eos", value=2), usage=Usage(prompt=2, generated=3))
    constants = {name.lower(): value for name, value in vars(limits).items() if isinstance(value, int | float)}
    return Template((HERE / "SPEC.md.in").read_text(encoding="utf-8")).substitute(
        constants,
        version=limits.PROTOCOL_VERSION,
        ignorable=IGNORABLE,
        features=", ".join(f"`{name}`" for name in limits.FEATURES),
        hello_seconds=f"{limits.HELLO_SECONDS:g}",
        errors=_error_table(),
        messages=_message_table(),
        fields=_field_table((made.NAME, made) for made in messages_by_tag()),
        structs=_field_table((made.__name__, made) for made in STRUCTS),
        limits=_limit_table(),
        example_client="\n".join([*dump(hello), "", *dump(request, 1)]),
        example_server="\n".join([*dump(tokens, 1), "", *dump(last, 1), "", *dump(done, 1)]),
        minimal_client=(HERE / "minimal_client.py.in").read_text(encoding="utf-8").strip(),
        shell_client=_shell(encode(hello), encode(request, 1)),
    )


def _ids(*tokens: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def _table(titles: str, rows: Iterable[tuple[Any, ...]]) -> str:
    names = titles.split(", ")
    lines = [names, ["---"] * len(names), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _message_table() -> str:
    rows = ((m.TAG, m.NAME, m.SENDER, _id(m), m.__doc__) for m in messages_by_tag())
    return _table("type, name, sender, id, meaning", rows)


def _id(made: type[Message]) -> str:
    if made in ABOUT_CONNECTION:
        return "0"
    return "not 0" if made in ABOUT_REQUEST else "any"


def _field_table(owners: Iterable[tuple[str, type[Struct]]]) -> str:
    rows: list[tuple[Any, ...]] = []
    for owner, made in owners:
        rows += [(owner, f"`{s.wire}`", s.kind.text(), _default(s), s.doc) for s in made.SPECS]
    return _table("in, field, type and range, default, meaning", rows)


def _default(spec: Spec) -> str:
    default = spec.default
    if default is MISSING:
        return "*required*"
    if default is None:
        return "*absent*"
    if isinstance(default, Struct):
        return "its defaults"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int | float):
        return _number(default)
    return str(default) if default else "empty"


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _error_table() -> str:
    rows = ((int(code), code.name, row.retry, "yes" if row.closes else "", row.http, row.when)
            for code, row in CODES.items())
    return _table("code, name, retry, closes, HTTP, when", rows)


def _limit_table() -> str:
    values = {**vars(limits), **vars(limits.ServerLimits())}
    rows = ((f"`{name.lower()}`", f"{_number(values[name])} {unit}".strip(), text)
            for name, (unit, text) in LIMITS.items())
    return _table("limit, value, of", rows)


# ---- examples ------------------------------------------------------------------------------------------------------


def dump(message: Message, request_id: int = 0) -> list[str]:
    """A frame in hex, a line per part, each with what it is."""
    data, body = encode(message, request_id), message.to_body()
    parts = [(data[:HEADER_BYTES], f"{len(data) - HEADER_BYTES} bytes follow"), (b"\x93", "array of 3"),
             (msgpack.packb(message.TAG), message.NAME), (msgpack.packb(request_id), f"request id {request_id}"),
             (bytes([0x80 | len(body)]), f"map of {len(body)}")]
    parts += [(msgpack.packb(key) + msgpack.packb(value), f"{key}: {_shown(value)}") for key, value in body.items()]
    assert b"".join(part for part, _ in parts) == data
    return [f"{part.hex(' ')}  # {text}" for part, text in parts]


def _shown(value: Any) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)


def _shell(*frames: bytes) -> str:
    """printf's octal escapes are in every shell; text stays readable."""
    lines = "".join(f"  printf '{''.join(map(_escaped, data))}'\n" for data in frames)
    return f"{{\n{lines}}} | nc -N -U /run/colibri/colibri.sock | xxd"


def _escaped(byte: int) -> str:
    plain = chr(byte).isascii() and (chr(byte).isalnum() or chr(byte) == "_")
    return chr(byte) if plain else f"\\{byte:03o}"
