"""Every error colibri_client raises on purpose. Messages name the field or the path, and the remedy.

    ColibriError
    ├── ConnectionFailed      no connection could be made
    ├── ConnectionLost        it broke, and the request could not be taken up again
    ├── TimeoutExceeded       the timeout given to this client passed; the request was cancelled
    ├── ClientClosed          used after close(), or in a forked child
    ├── ProtocolViolation     the server sent what it may not
    ├── AdminFailed           the daemon could not do what an administrator asked for
    └── RequestError          the request was refused or failed
        ├── ConnectionRefused Protocol, Version, FrameTooLarge, ReadTimeout, Permission, ...      codes 100–199
        ├── InvalidRequest    InvalidArgument, PromptEmpty, PromptTooLong, TokenOutOfRange, ...   200–299
        ├── Overloaded        QueueFull, TooManyInflight, KvExhausted, NotReady, Draining         300–399
        ├── Ended             DeadlineExceeded, Cancelled                                         400–499
        └── ServerFault       WorkerLost, Poisoned, WorkerHung, NonFinite, Internal               500–599

There is one class per code of the protocol, named after it; BY_CODE finds it.
"""

# ruff: noqa: N818  (named after what happened, as the codes of the protocol are)

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from colibri_protocol.errors import CODES, Code, InvalidMessage
from colibri_protocol.messages import Error, Usage

if TYPE_CHECKING:
    from .results import Token


class ColibriError(Exception):
    """Base of all errors of this package. ``str()`` is a complete sentence for a person at a terminal."""


class ConnectionFailed(ColibriError):
    """No connection could be made: no socket, nobody listens, no permission, no answer. ``path`` is the socket."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        super().__init__(f"{path}: {reason}")


class ConnectionLost(ColibriError):
    """The connection broke and the request could not be taken up again. ``tokens``: what had arrived."""

    def __init__(self, message: str, tokens: Sequence[Token] = ()) -> None:
        self.tokens = list(tokens)
        super().__init__(message)


class TimeoutExceeded(ColibriError, TimeoutError):
    """The ``timeout`` of a call passed and the request was cancelled. ``tokens``: what had arrived."""

    def __init__(self, seconds: float, tokens: Sequence[Token] = ()) -> None:
        self.seconds, self.tokens = seconds, list(tokens)
        super().__init__(f"no complete answer within {seconds:g} s; give more timeout, or ask for fewer tokens")


class ClientClosed(ColibriError):
    """The client was closed, or belongs to another process (a client cannot be used in a forked child)."""


class ProtocolViolation(ColibriError):
    """The server sent what it may not; the connection was given up. ``tokens``: what had arrived."""

    def __init__(self, message: str, tokens: Sequence[Token] = ()) -> None:
        self.tokens = list(tokens)
        super().__init__(f"the server broke the protocol: {message}; do client and daemon have the same version?")


class AdminFailed(ColibriError):
    """The daemon could not do what an administrator asked for; nothing has changed. ``result``: what it told of it."""

    def __init__(self, message: str, result: dict[str, Any]) -> None:
        self.result = result
        super().__init__(message)


class RequestError(ColibriError):
    """The request was refused or failed.

    ``code``: number, ``name``: its name; ``field``, ``index``, ``limit``: what is at fault, if one field is;
    ``retryable`` and ``retry_after`` (seconds or None): whether and when sending it again can help (the client has
    done so already, as often as it may); ``tokens``: what had arrived; ``usage``: work done, if any.
    """

    def __init__(self, code: int, message: str, *, field: str | None = None, index: int | None = None,
                 limit: int | None = None, retryable: bool = False, retry_after: float | None = None,
                 tokens: Sequence[Token] = (), usage: Usage | None = None) -> None:
        self.code, self.message, self.field, self.index, self.limit = code, message, field, index, limit
        self.retryable, self.retry_after = retryable, retry_after
        self.tokens, self.usage = list(tokens), usage
        super().__init__(message)

    @property
    def name(self) -> str:
        return Code(self.code).name if self.code in Code._value2member_map_ else f"CODE_{self.code}"

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


class ConnectionRefused(RequestError):
    """The server does not want this connection (codes 100–199)."""


class InvalidRequest(RequestError):
    """The request is wrong; sending it again cannot help (codes 200–299). Found here or by the server."""


class Overloaded(RequestError):
    """The daemon cannot take the request now (codes 300–399)."""


class Ended(RequestError):
    """The request was ended before it was complete (codes 400–499)."""


class ServerFault(RequestError):
    """The daemon failed (codes 500–599)."""


FAMILIES: dict[int, type[RequestError]] = {1: ConnectionRefused, 2: InvalidRequest, 3: Overloaded, 4: Ended,
                                           5: ServerFault}  # fmt: skip


def _class_of(code: Code) -> type[RequestError]:
    name = "".join(part.capitalize() for part in code.name.split("_"))
    doc = f"{code.name} ({int(code)}): {CODES[code].when}."
    return type(name, (FAMILIES[code // 100],), {"__doc__": doc, "__module__": __name__})


BY_CODE: dict[int, type[RequestError]] = {code: _class_of(code) for code in Code}
globals().update({cls.__name__: cls for cls in BY_CODE.values()})


def __getattr__(name: str) -> Any:
    """Only reached by names that do not exist; its presence tells type checkers that there are generated ones."""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def class_of(code: int) -> type[RequestError]:
    """The class for a code; a code this version does not know gets its family, else RequestError."""
    return BY_CODE.get(code) or FAMILIES.get(code // 100, RequestError)


def from_wire(error: Error, tokens: Sequence[Token] = ()) -> RequestError:
    """The exception for an ERROR message."""
    after = None if error.retry_after_ms is None else error.retry_after_ms / 1000
    return class_of(error.code)(error.code, error.message, field=error.field, index=error.index, limit=error.limit,
                                retryable=error.retryable, retry_after=after, tokens=tokens, usage=error.usage)


def from_local(error: InvalidMessage) -> RequestError:
    """The exception for a request that was found wrong before anything was sent."""
    return class_of(error.code)(error.code, error.message, field=error.field, index=error.index, limit=error.limit)
