"""A reader of one output: what is common to the asyncio stream and the blocking one, and the asyncio one."""

from __future__ import annotations

import asyncio
from functools import partial
from types import TracebackType
from typing import Any

from .errors import ColibriError
from .request import Output, Request
from .results import Completion, Token
from .session import Session

CLOSED = 1 << 62  # as a position: behind all tokens


class Reader:
    """Where one reader is in one output. Only one task or thread may read at a time."""

    def __init__(self, session: Session, loop: asyncio.AbstractEventLoop, request: Output) -> None:
        self._session, self._loop, self._request = session, loop, request
        self._position = self._reported = request.given

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._position == CLOSED

    @property
    def tokens(self) -> list[Token]:
        """What has arrived so far, read or not."""
        return list(self._request.received)

    @property
    def result(self) -> Completion:
        """The finished output; raises the error that ended it, or ColibriError while it goes on."""
        outcome = self._request.outcome
        if outcome is None:
            raise ColibriError("the stream has not ended; read it to its end first")
        if isinstance(outcome, ColibriError):
            raise outcome
        return outcome

    def cancel(self) -> None:
        """Asks the daemon to end the output; what is on its way can still be read, finish_reason is then abort."""
        self._post(self._session.cancel)

    def close(self) -> None:
        """Ends the reading, and the output if it goes on. Idempotent."""
        self._position = CLOSED
        if self._request.outcome is None:
            self._post(self._session.discard)

    def __del__(self) -> None:
        if self._request.outcome is None:
            self._post(self._session.discard)

    def _post(self, verb: Any, *arguments: Any) -> None:
        """Calls verb(request, ...) in the loop, soon: this may be another thread, or the garbage collector."""
        try:
            self._loop.call_soon_threadsafe(verb, self._request, *arguments)
        except RuntimeError:  # the loop is closed: the connection is, too
            self._request.finish(self._request.aborted())

    def _take(self) -> Token | None:
        """The next token, if it is here."""
        position, received = self._position, self._request.received
        if position >= len(received):
            return None
        self._position = position + 1
        if position - self._reported >= self._request.step:
            self._reported = position + 1
            self._report(position + 1)
        return received[position]

    def _report(self, position: int) -> None:
        self._post(self._session.consumed, position)


class AsyncStream(Reader):
    """Iterates over the tokens of one output: ``async for token in client.generate(...)``.

    Leaving early, by break, exception or cancellation of the task, cancels the request; ``async with`` does so for sure
    even where the stream is kept in a variable. ``result`` has the Completion at the end.
    """

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Token:
        request = self._request
        while (token := self._take()) is None:
            if request.outcome is not None:
                if isinstance(request.outcome, ColibriError) and not self.closed:
                    raise request.outcome
                raise StopAsyncIteration
            try:
                await progress(self._loop, request)
            except asyncio.CancelledError:
                self.close()
                raise
        return token

    def _report(self, position: int) -> None:
        self._session.consumed(self._request, position)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        traceback: TracebackType | None) -> None:
        self.close()


def progress(loop: asyncio.AbstractEventLoop, request: Request) -> asyncio.Future[None]:
    """A future that is done at the request's next progress, or at its end."""
    if request.wake is not None:
        raise ColibriError("another task is reading this stream; one at a time can")
    waiter: asyncio.Future[None] = loop.create_future()
    request.wake = partial(_resolve, waiter)
    waiter.add_done_callback(partial(_unset, request))
    return waiter


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _unset(request: Request, waiter: asyncio.Future[None]) -> None:
    if waiter.cancelled():
        request.wake = None
