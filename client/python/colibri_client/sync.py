"""The blocking client: an AsyncClient on a loop of its own, in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar, Unpack

import uvloop
from colibri_protocol.messages import HealthReply, LimitInfo, ModelInfo, StatsReply, TokenCheckReply

from .aio import AsyncClient
from .errors import ClientClosed, ColibriError
from .options import CheckOptions, GenerateOptions, ScoreOptions, TokenIds, generate_message
from .request import Output, Question
from .results import Completion, Scores, Token
from .session import Session
from .stream import Reader

CLOSE_SECONDS = 5.0  # for the loop's thread to end
T = TypeVar("T")


class Client:
    """A connection to the daemon, shared by any number of threads of one process.

        with Client() as client:
            for token in client.generate([1, 2, 3], max_tokens=64):
                print(token)

    Arguments as for AsyncClient. Connects at once; ConnectionFailed says why it cannot. A client made before a fork
    cannot be used in the child, which must make its own.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, timeout: float | None = None,
                 connect_timeout: float = 5.0, retries: int = 3, reconnect: float = 10.0) -> None:
        self._async = AsyncClient(path, timeout=timeout, connect_timeout=connect_timeout, retries=retries,
                                  reconnect=reconnect)
        self._pid, self._loop = os.getpid(), uvloop.new_event_loop()
        thread = threading.Thread(target=_run, args=(self._loop,), name="colibri-client", daemon=True)
        self._end = weakref.finalize(self, _shut, self._pid, self._loop, thread, self._async)  # also at exit
        thread.start()
        try:
            self._call(self._async.connect)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancels what is live, closes the connection, ends the thread. Idempotent."""
        self._end()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()

    @property
    def path(self) -> str:
        """The daemon's socket."""
        return self._async.path

    @property
    def model(self) -> ModelInfo:
        """The model that is served."""
        return self._async.model

    @property
    def limits(self) -> LimitInfo:
        """Limits of this connection."""
        return self._async.limits

    @property
    def server(self) -> str:
        """Name and version of the daemon."""
        return self._async.server

    # ---- outputs ----

    def generate(self, tokens: TokenIds, *, timeout: float | None = None,
                 **options: Unpack[GenerateOptions]) -> Stream:
        """Starts an output and returns the stream of its tokens. InvalidRequest at once if a field is wrong."""
        self.check_usable()
        request = Output(generate_message(tokens, options), streaming=True)
        self._loop.call_soon_threadsafe(_submit, self._async._session, request, timeout)
        return Stream(self, self._async._session, self._loop, request)

    def complete(self, tokens: TokenIds, *, timeout: float | None = None,
                 **options: Unpack[GenerateOptions]) -> Completion:
        """The whole output, when it is finished."""
        return self._call(partial(self._async.complete, tokens, timeout=timeout, **options))

    def score(self, tokens: TokenIds, *, top: int = 0, start: int = 1, timeout: float | None = None,
              **options: Unpack[ScoreOptions]) -> Scores:
        """Log probability of each token from position ``start`` on, given those before; ``top`` best alternatives."""
        return self._call(partial(self._async.score, tokens, top=top, start=start, timeout=timeout, **options))

    # ---- questions ----

    def token_check(self, tokens: TokenIds, *, timeout: float | None = None,
                    **options: Unpack[CheckOptions]) -> TokenCheckReply:
        """Whether ``generate`` would take this, and how much of it is cached; raises what ``generate`` would."""
        return self._call(partial(self._async.token_check, tokens, timeout=timeout, **options))

    def health(self, *, timeout: float | None = None) -> HealthReply:
        """State of the daemon and of its workers."""
        return self._call(partial(self._async.health, timeout=timeout))

    def stats(self, *, experts: bool = False, timeout: float | None = None) -> StatsReply:
        """The daemon's counters. experts: also the tokens of every expert of the model."""
        return self._call(partial(self._async.stats, experts=experts, timeout=timeout))

    def ping(self, *, timeout: float | None = None) -> float:
        """Seconds to the daemon and back."""
        return self._call(partial(self._async.ping, timeout=timeout))

    # ---- inside ----

    def ask(self, question: Question, timeout: float | None) -> Any:
        """The answer to any question about the daemon."""
        return self._call(partial(self._async.ask, question, timeout))

    def check_usable(self) -> None:
        """ClientClosed if this client cannot be used any more, or not in this process."""
        if os.getpid() != self._pid:
            raise ClientClosed("this client was made before a fork and belongs to the parent process; make one here")
        if not self._end.alive:
            raise ClientClosed("the client is closed; make another one")

    def _call(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a coroutine in the loop. KeyboardInterrupt here cancels it there."""
        self.check_usable()
        future = asyncio.run_coroutine_threadsafe(function(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


class Stream(Reader):
    """Iterates over the tokens of one output: ``for token in client.generate(...)``.

    Leaving early, by break, exception or Ctrl-C, cancels the request; ``with`` does so for sure even where the stream
    is kept in a variable. ``result`` has the Completion at the end.
    """

    def __init__(self, client: Client, session: Session, loop: asyncio.AbstractEventLoop, request: Output) -> None:
        super().__init__(session, loop, request)
        self._client = client  # which must live as long
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._wake = partial(self._wakes.put, None)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Token:
        request = self._request
        while True:
            outcome = request.outcome  # before looking for tokens: what has come by then is all
            token = self._take()
            if token is not None:
                return token
            if outcome is not None:
                self._stop(outcome)
            self._wait()

    def _stop(self, outcome: Completion | ColibriError) -> None:
        if isinstance(outcome, ColibriError) and not self.closed:
            raise outcome
        raise StopIteration

    def _wait(self) -> None:
        """Until there may be something new. The request sets its state before it looks for wake, and here it is the
        other way round, so that nothing is missed; being woken too often does no harm."""
        request = self._request
        try:
            self._client.check_usable()
            request.wake = self._wake
            if request.outcome is None and self._position >= len(request.received):
                self._wakes.get()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()


def _submit(session: Session, request: Output, timeout: float | None) -> None:
    try:
        session.submit(request, timeout)
    except ColibriError as e:
        request.finish(e)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """The thread."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _shut(pid: int, loop: asyncio.AbstractEventLoop, thread: threading.Thread, client: AsyncClient) -> None:
    """Ends the thread, from wherever: close(), the garbage collector, the interpreter's exit. Nothing in a child."""
    if os.getpid() != pid or not thread.is_alive():
        return

    async def close() -> None:
        try:
            await client.close()
        finally:
            loop.call_soon(loop.stop)

    asyncio.run_coroutine_threadsafe(close(), loop)
    if thread is not threading.current_thread():
        thread.join(CLOSE_SECONDS)
