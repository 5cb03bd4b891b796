"""Messages to frames and back.

A payload is the array [tag, request id, body]; body is a map of field names. Tag and id come first so that a body that
cannot be understood is still answered under its id. Bytes are canonical: fields in the order of declaration, defaults
left out, integers in their shortest form, floats as f64.
"""

from __future__ import annotations

import re
import struct
from typing import Any, NamedTuple

import msgpack

from .errors import Code, ConnectionFault, InvalidMessage, LocalError, ProtocolError, retryable
from .framing import frame
from .kinds import U53, bad, is_integer, shown
from .message import IGNORABLE, MESSAGES, Message
from .messages import Error, TokensOut
from .scan import broken, scan

ARRAY_OF_3 = 0x93
_INTEGERS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
# Nearly every TOKENS there is: one token, and counts that are at most U53, so that nothing is left to be checked.
_COUNT = rb"([\x00-\x7f]|\xcc.|\xcd..|\xce.{4}|\xcf\x00[\x00-\x1f].{6})"
_PLAIN_TOKENS = re.compile(rb"\x93\x05%b([\x81-\x84])\xa3ids\xc4\x04(.{4})(?:\xa5index%b)?(?:\xa4step%b)?"
                           rb"(?:\xadcached_tokens%b)?" % (4 * (_COUNT,)), re.DOTALL)
_packer = msgpack.Packer()  # its buffer is kept from call to call; one call is atomic under the GIL


class Envelope(NamedTuple):
    """A payload whose body has not been looked at."""

    tag: int
    id: int
    body: memoryview


# ---- encoding ------------------------------------------------------------------------------------------------------


def encode(message: Message, request_id: int = 0) -> bytes:
    """One frame, header included. LocalError if a field holds what msgpack cannot carry."""
    try:
        return frame(_packer.pack((message.TAG, request_id, message.to_body())))
    except (TypeError, ValueError, OverflowError) as e:  # UnicodeEncodeError is a ValueError
        raise LocalError(f"{message.NAME} cannot be encoded: {e}") from None


def tokens_frame(request_id: int, ids: bytes, index: int, step: int, **rare: Any) -> bytes:
    """encode(TokensOut(...), request_id) without making the object: the dispatcher sends one per token. rare: values of
    the other fields, as they travel (usage as a map)."""
    if rare:
        values = {"ids": ids, "index": index or None, "step": step or None, **rare}
        body = {name: value for name in _TOKEN_FIELDS if (value := values.get(name)) is not None}
    else:
        body = {"ids": ids}
        if index:
            body["index"] = index
        if step:
            body["step"] = step
    return frame(_packer.pack((TokensOut.TAG, request_id, body)))


_TOKEN_FIELDS = [spec.wire for spec in TokensOut.SPECS]


def error_message(exc: ProtocolError, tokens_sent: int = 0, retry_after_ms: int | None = None) -> Error:
    """The ERROR that reports exc. What the peer may have put into it is cut to what ERROR can carry."""
    return Error(code=int(exc.code), message=_cut(exc.message, 4096), retryable=retryable(exc.code, tokens_sent),
                 retry_after_ms=retry_after_ms, field=exc.field and _cut(exc.field, 256), index=_count(exc.index),
                 limit=_count(exc.limit), tokens_sent=tokens_sent)


def _cut(text: str, most: int) -> str:
    return text.encode("utf-8", "replace")[:most].decode("utf-8", "ignore")


def _count(number: int | None) -> int | None:
    return number if number is not None and 0 <= number <= U53 else None


# ---- decoding ------------------------------------------------------------------------------------------------------


def open_envelope(payload: bytes) -> Envelope:
    """Scans a payload and reads its tag and id. ConnectionFault if its form is broken."""
    scan(payload)
    if payload[0] != ARRAY_OF_3:
        raise broken("a message is an array of three: type, request id, body")
    tag, at = _unsigned(payload, 1, "type")
    request_id, at = _unsigned(payload, at, "request id")
    return Envelope(tag, request_id, memoryview(payload)[at:])


def _unsigned(payload: bytes, at: int, what: str) -> tuple[int, int]:
    """The integer at `at` and where the next value begins; any width and sign bit that holds it is accepted."""
    lead = payload[at]
    if lead < 0x80:
        return lead, at + 1
    if (form := _INTEGERS.get(lead)) is not None:
        value: int = struct.unpack_from(form, payload, at + 1)[0]
        if value >= 0:
            return value, at + 1 + struct.calcsize(form)
    raise broken(f"the {what} is not an integer from 0 to 2^64−1")


def decode_body(envelope: Envelope, kind: type[Message]) -> Any:
    """The message, checked. InvalidMessage names the field at fault."""
    try:
        body = msgpack.unpackb(envelope.body, object_pairs_hook=_unique, strict_map_key=False)
    except UnicodeDecodeError:
        raise _not_text(envelope.body) from None
    return kind.from_body(body)


def decode(payload: bytes) -> tuple[Any, int]:
    """The message in one payload, None for one that may be skipped, and its request id. Any message in any order: a
    connection.Connection knows what is allowed."""
    envelope = open_envelope(payload)
    if (kind := MESSAGES.get(envelope.tag)) is not None:
        return decode_body(envelope, kind), envelope.id
    if envelope.tag < IGNORABLE:
        raise ConnectionFault(Code.PROTOCOL, f"type {envelope.tag} is unknown")
    return None, envelope.id


def plain_tokens(payload: bytes) -> tuple[TokensOut, int] | None:
    """decode() of a plain TOKENS in a third of the time; None for anything else. A client gets one for each token."""
    if (found := _PLAIN_TOKENS.fullmatch(payload)) is None:
        return None
    request_id, entries, ids, *counts = found.groups()
    if entries[0] != 0x84 - counts.count(None):
        return None
    index, step, cached = map(_number, counts)
    return TokensOut(ids=ids, index=index or 0, step=step or 0, cached_tokens=cached), _number(request_id)


def _number(count: bytes | None) -> Any:
    """Of a _COUNT that was matched, or None."""
    return count and (count[0] if len(count) == 1 else int.from_bytes(count[1:], "big"))


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A map with each key once; keys are text or, in logit_bias, integers."""
    made: dict[Any, Any] = {}
    for key, value in pairs:
        if not _is_key(key):
            raise bad("body", f"has the key {shown(key)}; keys are text")
        if key in made:
            raise bad(str(key), "is there twice")
        made[key] = value
    return made


def _is_key(value: Any) -> bool:
    return isinstance(value, str) or is_integer(value)


def _not_text(body: memoryview) -> InvalidMessage:
    """Names the field whose text is not UTF-8."""
    fields = msgpack.unpackb(body, object_pairs_hook=tuple, strict_map_key=False, unicode_errors="surrogateescape")
    for key, value in fields if isinstance(fields, tuple) else ():
        if not _is_key(key) or not _is_text(key):
            break
        if not _is_text(value):
            return bad(str(key), "has text that is not UTF-8")
    return bad("body", "has text that is not UTF-8")


def _is_text(value: Any) -> bool:
    try:
        msgpack.packb(value)
    except UnicodeEncodeError:
        return False
    return True
