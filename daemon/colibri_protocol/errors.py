"""Error codes of the protocol and the exceptions that carry them.

One row of CODES per code: adding one is adding a row. Codes are permanent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Code(IntEnum):
    """Permanent numbers; CODES says what each means."""

    PROTOCOL = 100
    VERSION = 101
    FRAME_TOO_LARGE = 102
    READ_TIMEOUT = 103
    PERMISSION = 104
    TOO_MANY_CONNECTIONS = 105
    SLOW_READER = 106
    INVALID_ARGUMENT = 200
    PROMPT_EMPTY = 201
    PROMPT_TOO_LONG = 202
    TOKEN_OUT_OF_RANGE = 203
    DUPLICATE_ID = 204
    NEVER_FITS = 205
    UNSUPPORTED = 206
    MODEL_MISMATCH = 207
    QUEUE_FULL = 300
    TOO_MANY_INFLIGHT = 301
    KV_EXHAUSTED = 302
    NOT_READY = 303
    DRAINING = 304
    DEADLINE_EXCEEDED = 400
    CANCELLED = 401
    WORKER_LOST = 500
    POISONED = 501
    WORKER_HUNG = 502
    NON_FINITE = 503
    INTERNAL = 599


@dataclass(frozen=True)
class Row:
    """retry: "no", "yes", "after" (retry_after_ms or another event), "unsent" (only if tokens_sent is 0), "elsewhere"
    (another instance). closes: the connection ends with it."""

    retry: str
    http: int
    when: str
    closes: bool = False


CODES: dict[Code, Row] = {
    Code.PROTOCOL: Row("no", 400, "a malformed frame or message, or one that is not allowed now", True),
    Code.VERSION: Row("no", 502, "no protocol version in common", True),
    Code.FRAME_TOO_LARGE: Row("no", 413, "a frame longer than the limit in WELCOME", True),
    Code.READ_TIMEOUT: Row("yes", 408, "no HELLO, or no rest of a started frame, in time", True),
    Code.PERMISSION: Row("no", 403, "this user may not connect, or may not name a tenant"),
    Code.TOO_MANY_CONNECTIONS: Row("after", 503, "connection limit of the daemon or of this user", True),
    Code.SLOW_READER: Row("no", 499, "the client does not read and the output limit is reached", True),
    Code.INVALID_ARGUMENT: Row("no", 400, "a field has the wrong type or range; field names it"),
    Code.PROMPT_EMPTY: Row("no", 400, "no tokens"),
    Code.PROMPT_TOO_LONG: Row("no", 400, "more tokens than limit allows"),
    Code.TOKEN_OUT_OF_RANGE: Row("no", 400, "a token id outside the vocabulary, in field at index"),
    Code.DUPLICATE_ID: Row("no", 409, "the request id is live on this connection"),
    Code.NEVER_FITS: Row("no", 400, "needs more KV cache than there is"),
    Code.UNSUPPORTED: Row("no", 400, "a feature that was not negotiated or does not exist"),
    Code.MODEL_MISMATCH: Row("no", 404, "another model is served"),
    Code.QUEUE_FULL: Row("after", 429, "too many requests or tokens are waiting"),
    Code.TOO_MANY_INFLIGHT: Row("after", 429, "too many live requests on this connection or of this user"),
    Code.KV_EXHAUSTED: Row("after", 503, "no KV cache left after preemption"),
    Code.NOT_READY: Row("after", 503, "the model could not be loaded, or no worker is there"),
    Code.DRAINING: Row("elsewhere", 503, "the daemon is stopping"),
    Code.DEADLINE_EXCEEDED: Row("no", 504, "the deadline passed before the first token"),
    Code.CANCELLED: Row("no", 499, "ended by an administrator"),
    Code.WORKER_LOST: Row("unsent", 503, "the worker died and no other could take the request over"),
    Code.POISONED: Row("no", 500, "the request took two workers down"),
    Code.WORKER_HUNG: Row("unsent", 504, "the worker hung and no other could take the request over"),
    Code.NON_FINITE: Row("no", 500, "the model computed NaN or infinity"),
    Code.INTERNAL: Row("no", 500, "a fault of the daemon; the message has an incident id for its log"),
}


def retryable(code: int, tokens_sent: int) -> bool:
    """Whether sending the same request again to the same daemon can help."""
    row = CODES.get(Code(code)) if code in Code._value2member_map_ else None
    return row is not None and (row.retry in ("yes", "after") or row.retry == "unsent" and tokens_sent == 0)


class ProtocolError(Exception):
    """Base of what this package raises. code, message and the place: field name, index in it, the limit exceeded."""

    def __init__(self, code: Code, message: str, field: str | None = None, index: int | None = None,
                 limit: int | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.field, self.index, self.limit = code, message, field, index, limit

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class InvalidMessage(ProtocolError):  # noqa: N818
    """A message with a bad field: the request fails, the connection lives on (h11's local/remote split: the peer's
    fault, found here)."""


class ConnectionFault(ProtocolError):  # noqa: N818
    """The byte stream or the order of messages is broken: the connection must be closed after reporting it. events:
    what Connection.receive had found before, in the same piece of data."""

    events: Sequence[Any] = ()


class LocalError(Exception):
    """The caller of this package did what the protocol does not allow; nothing was sent."""
