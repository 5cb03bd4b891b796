"""Which daemon and which tokenizer a command uses, and how its errors become exit codes."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import click
from colibri_protocol.errors import Code
from colibri_protocol.messages import ModelInfo

from ..dial import DEFAULT_SOCKET
from ..errors import ColibriError, ConnectionFailed, ConnectionLost, RequestError, TimeoutExceeded
from ..text import TextError, Tokenizer


class Exit(IntEnum):
    """Exit codes, as --help promises them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO_DAEMON = 3
    INTERRUPTED = 130
    BROKEN_PIPE = 141  # as a process has that SIGPIPE ends


@dataclass(frozen=True)
class Target:
    """socket: of the daemon. model: folder of the tokenizer, None: the one that the daemon names."""

    socket: str = DEFAULT_SOCKET
    model: Path | None = None

    @classmethod
    def of(cls, socket: str | None, model: Path | None) -> Target:
        return cls().but(socket or os.environ.get("COLIBRI_SOCKET"),
                         model or _path(os.environ.get("COLIBRI_MODEL")))

    def but(self, socket: str | None, model: Path | None) -> Target:
        """With what is given in the place of what was."""
        return replace(self, socket=socket or self.socket, model=model or self.model)

    def folder(self, served: ModelInfo) -> Path | None:
        """The model folder, if it is known."""
        return self.model or _path(served.folder)

    def tokenizer(self, served: ModelInfo) -> Tokenizer:
        """TextError if there is none."""
        folder = self.folder(served)
        if folder is None:
            raise TextError("the daemon does not say where its model is; pass --model DIR, or --tokens")
        return Tokenizer(folder)

    def tokenizer_if_any(self, served: ModelInfo) -> Tokenizer | None:
        """For output of requests made of token ids. A --model that cannot be used is still an error."""
        try:
            return self.tokenizer(served)
        except TextError:
            if self.model is not None:
                raise
            return None


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def connection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--socket and --model; None where they are not given."""
    for option in (
        click.option("--model", type=click.Path(path_type=Path), metavar="DIR",
                     help="Model folder with the tokenizer. Default: COLIBRI_MODEL, else what the daemon names."),
        click.option("--socket", type=click.Path(), metavar="PATH",
                     help=f"Socket of the daemon. Default: COLIBRI_SOCKET, else {DEFAULT_SOCKET}."),
    ):
        function = option(function)
    return function


def connecting(function: Callable[..., int | None]) -> Callable[..., None]:
    """A command that talks to a daemon: its function gets ``target`` first and returns an exit code (None: 0).

    Errors become a message on stderr and an exit code, with ``as_json`` also an object {"error": ...} on stdout.
    """

    @connection_options
    @click.pass_obj
    @functools.wraps(function)
    def run(outer: Target, socket: str | None, model: Path | None, **kwargs: Any) -> None:
        as_json = bool(kwargs.get("as_json"))
        sys.exit(_guarded(function, outer.but(socket, model), as_json, kwargs))

    return run


def _guarded(function: Callable[..., int | None], target: Target, as_json: bool, kwargs: dict[str, Any]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ? instead of failing
    try:
        try:
            code = function(target, **kwargs) or Exit.OK
        except ColibriError as e:
            code = report(e, as_json)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at exit; that must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = Exit.BROKEN_PIPE
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo("\ninterrupted", err=True)
        code = Exit.INTERRUPTED
    return int(code)


def report(error: ColibriError, as_json: bool = False) -> Exit:
    """Tells what went wrong; the exit code for it."""
    if as_json:
        click.echo(json.dumps({"error": _error_body(error)}))
    click.echo(f"error: {described(error)}", err=True)
    if isinstance(error, TextError):
        return Exit.USAGE
    return Exit.NO_DAEMON if isinstance(error, ConnectionFailed | ConnectionLost | TimeoutExceeded) else Exit.FAILED


def _error_body(error: ColibriError) -> dict[str, Any]:
    body: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, RequestError):
        found = {"code": error.code, "name": error.name, "field": error.field, "index": error.index,
                 "limit": error.limit, "retryable": error.retryable, "retry_after_s": error.retry_after}
        body |= {"message": error.message, **{key: value for key, value in found.items() if value is not None}}
    tokens = getattr(error, "tokens", None)
    return {**body, "tokens": [int(t) for t in tokens]} if tokens else body


# What a person at a terminal can do, where the daemon's message alone does not say it.
REMEDIES: dict[int, str] = {
    Code.PERMISSION: "ask who runs the daemon to allow this user",
    Code.TOO_MANY_CONNECTIONS: "close other clients, or raise the daemon's --connections-per-uid",
    Code.PROMPT_EMPTY: "pass --tokens, --text or --chat with something in it",
    Code.PROMPT_TOO_LONG: "shorten the prompt; the daemon's --max-tokens-total bounds prompt and output together",
    Code.TOKEN_OUT_OF_RANGE: "are these ids, or the --model folder, of the model that is served?",
    Code.NEVER_FITS: "lower --max-tokens, or give the daemon more --kv-bytes",
    Code.QUEUE_FULL: "try again later, or give the daemon more workers",
    Code.TOO_MANY_INFLIGHT: "wait until other requests end",
    Code.NOT_READY: "colibri-client health says why",
    Code.DRAINING: "the daemon is stopping; try again when it is back",
    Code.DEADLINE_EXCEEDED: "give more --deadline, or ask for less",
    Code.WORKER_LOST: "try again; the daemon's log has the reason",
    Code.POISONED: "the daemon's log has the reason",
    Code.WORKER_HUNG: "try again; the daemon's log has the reason",
    Code.NON_FINITE: "colibrid verify checks the model's files",
    Code.INTERNAL: "the daemon's log has more under this incident id",
}


def described(error: ColibriError) -> str:
    """One line: code and name, message, the field if the message does not name it, the remedy."""
    if isinstance(error, TimeoutExceeded):  # only questions about the daemon have a timeout here
        return f"the daemon gives no answer within {error.seconds:g} s; its log may say why"
    if not isinstance(error, RequestError):
        return str(error)
    name = error.field
    field = f" (field {name})" if name and name not in error.message else ""
    remedy = REMEDIES.get(error.code)
    return f"{error.name} ({int(error.code)}): {error.message}{field}" + (f"; {remedy}" if remedy else "")
