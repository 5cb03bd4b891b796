"""All that happens between a request and its answer: connections, retries, resumption, limits, deadlines.

Callbacks only: a request that goes well costs no task. Everything here runs in the thread of one loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass, field

from colibri_protocol.errors import Code
from colibri_protocol.limits import PING_SECONDS
from colibri_protocol.messages import ModelInfo, Welcome

from .dial import dial
from .errors import (
    ClientClosed,
    ColibriError,
    ConnectionFailed,
    ConnectionLost,
    RequestError,
    TimeoutExceeded,
    class_of,
)
from .link import Link, Reason
from .request import Output, Request
from .retry import Policy

FLUSH_SECONDS = 1.0  # for a server to take what was written before the end


@dataclass(frozen=True)
class Settings:
    """``timeout``: default for each call, in seconds, None for none. ``connect_timeout``: for one connection, handshake
    included. ``ping``: seconds of silence, while an answer is owed, before the server is asked for a sign of life."""

    policy: Policy = field(default_factory=Policy)
    timeout: float | None = None
    connect_timeout: float = 5.0
    ping: float = PING_SECONDS


class Session:
    """The owner of links. ``current``: where new requests go. ``welcome``: what the server said last when greeting."""

    def __init__(self, path: str, settings: Settings) -> None:
        self.path, self.settings = path, settings
        self.current: Link | None = None
        self.welcome: Welcome | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._links: set[Link] = set()
        self._waiting: deque[Request] = deque()  # for a connection, or for room on it
        self._delayed: dict[Request, asyncio.TimerHandle] = {}  # until their next attempt
        self._dialing: asyncio.Task[None] | None = None
        self._ids = itertools.count(1)
        self._patient = False  # connecting is repeated: not the first time, nor after that was in vain
        self._closed = False

    @property
    def greeting(self) -> Welcome:
        """The last WELCOME. ColibriError before there was one."""
        if self.welcome is None:
            raise ColibriError("not connected yet; use the client in a with block, or call connect() first")
        return self.welcome

    @property
    def model(self) -> ModelInfo:
        """What is served, as far as is known."""
        link = self.current
        return link.model if link is not None and link.model is not None else self.greeting.model

    # ---- verbs ----

    async def connect(self) -> None:
        """Connects unless there is a connection. Raises what stands in the way."""
        self._open_check()
        if self.current is None or not self.current.usable:
            await asyncio.shield(self._begin_dialing())

    def submit(self, request: Request, timeout: float | None) -> None:
        """Takes a request over; its outcome will be set."""
        self._open_check()
        assert self._loop is not None
        seconds = self.settings.timeout if timeout is None else timeout
        if seconds is not None:
            request.timer = self._loop.call_later(seconds, self._expire, request, seconds)
        request.submitted = self._loop.time()
        self._place(request)

    def cancel(self, request: Request, reason: str = "") -> None:
        """The request ends with finish_reason abort; what is on its way still arrives."""
        if request.outcome is not None or request.cancelled:
            return
        request.cancelled = True
        if request.link is not None:
            request.link.cancel(request, reason)
        else:
            self._withdraw(request)
            request.finish(request.aborted())

    def discard(self, request: Request, outcome: ColibriError | None = None) -> None:
        """Cancels, and forgets what may still arrive."""
        if request.outcome is not None:
            return
        self._withdraw(request)
        link: Link | None = request.link
        if link is not None:
            if not request.cancelled:
                link.cancel(request, str(outcome or ""))
            link.forget(request)
            self._close_if_done(link)
        request.finish(outcome or request.aborted())

    def consumed(self, request: Output, position: int) -> None:
        """The reader has taken all tokens before position: the server may send as many again."""
        if request.link is not None:
            request.link.grant(request, request.regrant(position))

    async def close(self) -> None:
        """Cancels what is live and closes every connection. Idempotent."""
        self._closed = True
        if self._dialing is not None:
            self._dialing.cancel()
            await asyncio.wait([self._dialing])
        for request in [*self._waiting, *self._delayed]:
            self.discard(request, _closed_error())
        links = [link for link in self._links if link.connected]
        for end in (Link.bye, Link.drop):
            for link in links:
                end(link)
            if links:
                await asyncio.wait([link.closed for link in links], timeout=FLUSH_SECONDS)

    # ---- placing ----

    def _open_check(self) -> None:
        if self._closed:
            raise _closed_error()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise ColibriError("this client belongs to another event loop; make one per loop, or use Client")

    def _place(self, request: Request) -> None:
        """Sends it, or lets it wait for a connection or for room."""
        self._delayed.pop(request, None)
        link = self.current
        if link is not None and link.usable and (not request.limited or (link.room and not self._waiting)):
            self._start(link, request)
            return
        self._waiting.append(request)
        self._pump()

    def _pump(self) -> None:
        """Sends what waits, as far as there is room; connects if there is no connection."""
        link = self.current
        if link is None or not link.usable:
            if self._waiting and not self._closed:
                self._begin_dialing()
            return
        while self._waiting and link.usable and link.room:
            self._start(link, self._waiting.popleft())

    def _start(self, link: Link, request: Request) -> None:
        assert self._loop is not None
        try:
            link.start(request, int((self._loop.time() - request.submitted) * 1000))
        except ColibriError as e:
            request.finish(e)

    def _withdraw(self, request: Request) -> None:
        handle = self._delayed.pop(request, None)
        if handle is not None:
            handle.cancel()
        elif request.link is None and request in self._waiting:
            self._waiting.remove(request)

    def _later(self, request: Request, seconds: float) -> None:
        assert self._loop is not None
        self._delayed[request] = self._loop.call_later(seconds, self._place, request)

    def _expire(self, request: Request, seconds: float) -> None:
        self.discard(request, TimeoutExceeded(seconds, request.tokens))

    # ---- dialing ----

    def _begin_dialing(self) -> asyncio.Task[None]:
        if self._dialing is None:
            self._dialing = asyncio.ensure_future(self._dial())
            self._dialing.add_done_callback(self._dialed)
        return self._dialing

    def _dialed(self, task: asyncio.Task[None]) -> None:
        self._dialing = None
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._pump()
            return
        if not isinstance(error, ColibriError):
            error = ConnectionFailed(self.path, f"{type(error).__name__}: {error}")
        waiting, self._waiting = list(self._waiting), deque()
        for request in waiting:
            request.finish(_no_connection(request, error))

    async def _dial(self) -> None:
        """Makes a current link, trying as long and as often as the policy allows."""
        policy, loop = self.settings.policy, asyncio.get_running_loop()
        began, failures, refusals = loop.time(), 0, 0
        while True:
            try:
                self.current = await dial(self.path, self._make_link, self.settings.connect_timeout)
                self.welcome, self._patient = self.current.welcome, True
                return
            except ConnectionFailed:
                failures += 1
                delay = policy.reconnect_after(failures + 1, loop.time() - began) if self._patient else None
                if delay is None:
                    self._patient = False
                    raise
            except RequestError as e:
                refusals += 1
                delay = policy.again(e, refusals)
                if delay is None:
                    raise
            await asyncio.sleep(delay)

    def _make_link(self) -> Link:
        assert self._loop is not None
        link = Link(self, self._loop, self.settings.ping, self._ids.__next__)
        self._links.add(link)
        return link

    # ---- what links tell ----

    def link_freed(self, link: Link) -> None:
        self._close_if_done(link)
        if self._waiting:
            self._pump()

    def link_away(self, link: Link) -> None:
        """Questions that wait can still be asked there. A daemon that greets and says GOAWAY in one breath refuses what
        waits for it, as if it had said DRAINING to each."""
        if self.current is link:
            self.current = None
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            if not request.limited and link.connected:
                self._start(link, request)
            elif link.fresh:
                self._again_or_end(request, class_of(Code.DRAINING)(Code.DRAINING, "the daemon is stopping"))
            else:
                self._waiting.append(request)
        self._close_if_done(link)
        self._pump()

    def link_lost(self, link: Link, reason: Reason, requests: list[Request]) -> None:
        self._links.discard(link)
        if self.current is link:
            self.current = None
        for request in requests:
            self._lost(request, reason)
        self._pump()

    def request_failed(self, link: Link, request: Request, error: RequestError) -> None:
        if error.code == Code.DRAINING:
            link.away = True
            self.link_away(link)
        self._again_or_end(request, error)

    def _again_or_end(self, request: Request, error: RequestError) -> None:
        delay = self.settings.policy.again(error, request.attempts + 1)
        if delay is None or request.cancelled or self._closed:
            request.finish(error)
            return
        request.attempts, request.error = request.attempts + 1, error
        self._later(request, delay)

    def _lost(self, request: Request, reason: Reason) -> None:
        """Takes the request up on another connection, if that can help."""
        if request.cancelled:
            request.finish(request.aborted())
        elif self._closed:
            request.finish(_closed_error())
        elif not reason.again:
            request.finish(reason.error(request.tokens))
        else:
            self._take_up(request, reason)

    def _take_up(self, request: Request, reason: Reason) -> None:
        assert self._loop is not None
        now = self._loop.time()
        if request.progressed or not request.losses:
            request.losses, request.first_loss = 0, now
        request.losses += 1
        request.error = reason.error(request.tokens)
        delay = self.settings.policy.reconnect_after(request.losses, now - request.first_loss)
        if delay is None:
            request.finish(request.error)
        elif delay:
            self._later(request, delay)
        else:
            self._place(request)

    def _close_if_done(self, link: Link) -> None:
        if link.away and link.idle:
            link.bye()


def _closed_error() -> ClientClosed:
    return ClientClosed("the client is closed; make another one")


def _no_connection(request: Request, error: ColibriError) -> ColibriError:
    """Why a request that waited for a connection failed: with what it had, if it had been on one before."""
    if request.error is None:
        return error
    if isinstance(request.error, RequestError):
        return request.error
    return ConnectionLost(f"{request.error}; and no new one could be made: {error}", request.tokens)

