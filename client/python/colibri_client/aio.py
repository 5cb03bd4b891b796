"""The client for asyncio."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from types import TracebackType
from typing import Any, Unpack

from colibri_protocol.messages import (
    Health,
    HealthReply,
    LimitInfo,
    ModelInfo,
    Ping,
    Pong,
    Stats,
    StatsReply,
    TokenCheckReply,
)

from .dial import socket_path
from .errors import ColibriError, ProtocolViolation
from .options import (
    CheckOptions,
    GenerateOptions,
    ScoreOptions,
    TokenIds,
    check_message,
    generate_message,
    score_message,
)
from .request import Output, Question, Request, Scoring
from .results import Completion, Scores
from .retry import Policy
from .session import Session, Settings
from .stream import AsyncStream, progress


class AsyncClient:
    """A connection to the daemon, shared by any number of tasks of one event loop.

        async with AsyncClient() as client:
            async for token in client.generate([1, 2, 3], max_tokens=64):
                print(token)

    ``path``: the daemon's socket; by default $COLIBRI_SOCKET, else /run/colibri/colibri.sock. ``timeout``: default of
    every call, in seconds. ``connect_timeout``: seconds for making one connection. ``retries``: attempts after the
    first for errors that may pass (queue full, draining), with back-off. ``reconnect``: seconds that a lost connection
    may take to come back; outputs then go on where they were, token for token; 0: a lost connection is an error.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, timeout: float | None = None,
                 connect_timeout: float = 5.0, retries: int = 3, reconnect: float = 10.0) -> None:
        policy = Policy(retries=retries, reconnect=reconnect)
        self._session = Session(socket_path(path), Settings(policy, timeout, connect_timeout))

    # ---- connection ----

    async def connect(self) -> None:
        """Connects now, not at the first request. ConnectionFailed says why it cannot."""
        await self._session.connect()

    async def close(self) -> None:
        """Cancels what is live and closes the connection. Idempotent."""
        await self._session.close()

    async def __aenter__(self) -> AsyncClient:
        await self.connect()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        traceback: TracebackType | None) -> None:
        await self.close()

    @property
    def path(self) -> str:
        """The daemon's socket."""
        return self._session.path

    @property
    def model(self) -> ModelInfo:
        """The model that is served."""
        return self._session.model

    @property
    def limits(self) -> LimitInfo:
        """Limits of this connection."""
        return self._session.greeting.limits

    @property
    def server(self) -> str:
        """Name and version of the daemon."""
        return self._session.greeting.server

    # ---- outputs ----

    def generate(self, tokens: TokenIds, *, timeout: float | None = None,
                 **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Starts an output and returns the stream of its tokens. InvalidRequest at once if a field is wrong."""
        request = Output(generate_message(tokens, options), streaming=True)
        self._session.submit(request, timeout)
        return AsyncStream(self._session, asyncio.get_running_loop(), request)

    async def complete(self, tokens: TokenIds, *, timeout: float | None = None,
                       **options: Unpack[GenerateOptions]) -> Completion:
        """The whole output, when it is finished."""
        return await self._outcome(Output(generate_message(tokens, options), streaming=False), timeout)

    async def score(self, tokens: TokenIds, *, top: int = 0, start: int = 1, timeout: float | None = None,
                    **options: Unpack[ScoreOptions]) -> Scores:
        """Log probability of each token from position ``start`` on, given those before; ``top`` best alternatives."""
        return await self._outcome(Scoring(score_message(tokens, top, start, options)), timeout)

    # ---- questions ----

    async def token_check(self, tokens: TokenIds, *, timeout: float | None = None,
                          **options: Unpack[CheckOptions]) -> TokenCheckReply:
        """Whether ``generate`` would take this, and how much of it is cached; raises what ``generate`` would."""
        return await self._outcome(Request(check_message(tokens, options), TokenCheckReply), timeout)

    async def health(self, *, timeout: float | None = None) -> HealthReply:
        """State of the daemon and of its workers."""
        return await self._outcome(Question(Health(), HealthReply), timeout)

    async def stats(self, *, experts: bool = False, timeout: float | None = None) -> StatsReply:
        """The daemon's counters. experts: also the tokens of every expert of the model."""
        return await self._outcome(Question(Stats(experts=experts), StatsReply), timeout)

    async def ping(self, *, timeout: float | None = None) -> float:
        """Seconds to the daemon and back."""
        data, began = secrets.token_bytes(8), time.perf_counter()
        pong = await self._outcome(Question(Ping(data=data), Pong), timeout)
        if pong.data != data:
            raise ProtocolViolation("PONG with other data than PING")
        return time.perf_counter() - began

    async def ask(self, question: Question, timeout: float | None) -> Any:
        """The answer to any question about the daemon."""
        return await self._outcome(question, timeout)

    async def _outcome(self, request: Request, timeout: float | None) -> Any:
        """Runs a request to its end; cancels it if the task is cancelled."""
        self._session.submit(request, timeout)
        try:
            while request.outcome is None:
                await progress(asyncio.get_running_loop(), request)
        except asyncio.CancelledError:
            self._session.discard(request)
            raise
        if isinstance(request.outcome, ColibriError):
            raise request.outcome
        return request.outcome
