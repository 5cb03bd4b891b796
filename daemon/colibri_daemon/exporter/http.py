"""A small HTTP/1.1 server for GET and HEAD: h11 speaks the protocol, asyncio moves the bytes.

Bounded in every way: connections (the one that is idle longest goes when there are too many), bytes of a request, time
for a request and its answer, time between two. Nothing that a client sends is kept or looked at but method, path and
Accept-Encoding.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any

import h11

from ..common import log

MOST_CONNECTIONS = 32
MOST_HEAD = 8192  # bytes of a request's head
MOST_BODY = 65536  # bytes of a request's body, which is thrown away
REQUEST_SECONDS = 10.0  # from a request's first byte until its answer is taken
IDLE_SECONDS = 300.0  # between requests
_GZIP = 16 + zlib.MAX_WBITS
_log = log.get("http")


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"


Handler = Callable[[], Answer]


class HttpServer:
    """routes: by path."""

    def __init__(self, routes: dict[str, Handler]) -> None:
        self._routes = routes
        self._connections: dict[Connection, None] = {}  # the one that was idle longest first

    def connection(self) -> Connection:
        """For asyncio's create_server()."""
        return Connection(self)

    def opened(self, connection: Connection) -> None:
        if len(self._connections) >= MOST_CONNECTIONS:
            oldest = next((other for other in self._connections if other.idle), next(iter(self._connections)))
            oldest.abort()
            self.closed(oldest)
        self._connections[connection] = None

    def used(self, connection: Connection) -> None:
        """It has been answered."""
        if connection in self._connections:
            del self._connections[connection]
            self._connections[connection] = None

    def closed(self, connection: Connection) -> None:
        self._connections.pop(connection, None)

    def answer(self, method: bytes, target: bytes) -> Answer:
        path = target.partition(b"?")[0].decode("ascii", "replace")
        if (handler := self._routes.get(path)) is None:
            return Answer(404, f"nothing is here; try {', '.join(self._routes)}\n".encode())
        if method not in (b"GET", b"HEAD"):
            return Answer(405, b"only GET and HEAD\n")
        try:
            return handler()
        except Exception:
            _log.exception("a request could not be answered", path=path)
            return Answer(500, b"a fault of the daemon; see its log\n")


class Connection(asyncio.Protocol):
    """idle: no request is under way."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEAD)
        self._request: h11.Request | None = None
        self._received = 0  # bytes of the request's body
        self._full = False  # the client does not read
        self.idle = True

    # ---- asyncio's calls ----

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport
        self._timer = self._after(REQUEST_SECONDS)
        self._server.opened(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._timer.cancel()
        self._server.closed(self)

    def data_received(self, data: bytes) -> None:
        if self.idle:
            self._set_idle(False)
        self._http.receive_data(data)
        self._go_on()

    def eof_received(self) -> bool:
        """What was asked before is still answered."""
        self._http.receive_data(b"")
        self._go_on()
        return False

    def pause_writing(self) -> None:
        self._full = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._full = False
        self._transport.resume_reading()
        self._go_on()

    # ---- requests ----

    def _go_on(self) -> None:
        try:
            while not self._full and not self._transport.is_closing():
                event = self._http.next_event()
                if event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                    return
                if event is h11.PAUSED:
                    self._transport.close()
                    return
                self._take(event)
        except h11.RemoteProtocolError as e:
            self._refuse(e.error_status_hint)

    def _take(self, event: Any) -> None:
        if isinstance(event, h11.Request):
            self._request, self._received = event, 0
            if self._http.they_are_waiting_for_100_continue:
                self._refuse(417)
        elif isinstance(event, h11.Data):
            self._received += len(event.data)
            if self._received > MOST_BODY:
                self._refuse(413)
        elif isinstance(event, h11.EndOfMessage) and self._request is not None:
            request, self._request = self._request, None
            self._send(request, self._server.answer(request.method, request.target))
            if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
                self._http.start_next_cycle()
                self._set_idle(True)
                self._server.used(self)
            elif self._http.our_state is h11.MUST_CLOSE:
                self._transport.close()

    def _send(self, request: h11.Request, answer: Answer) -> None:
        body, headers = answer.body, [("Content-Type", answer.kind)]
        if _accepts_gzip(request):
            packer = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
            body = packer.compress(body) + packer.flush()
            headers.append(("Content-Encoding", "gzip"))
        headers += [("Content-Length", str(len(body))), ("Date", formatdate(usegmt=True)), ("Vary", "Accept-Encoding")]
        if answer.status == 405:
            headers.append(("Allow", "GET, HEAD"))
        if request.method == b"HEAD":
            body = b""
        self._write(h11.Response(status_code=answer.status, headers=headers), h11.Data(data=body), h11.EndOfMessage())

    def _refuse(self, status: int) -> None:
        """The request makes no sense: the last answer of this connection."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._write(h11.Response(status_code=status, headers=[("Content-Length", "0"), ("Connection", "close")]),
                        h11.EndOfMessage())
        self._transport.close()

    def _write(self, *events: Any) -> None:
        self._transport.write(b"".join(self._http.send(event) or b"" for event in events))

    # ---- time ----

    def _set_idle(self, idle: bool) -> None:
        self.idle = idle
        self._timer.cancel()
        self._timer = self._after(IDLE_SECONDS if idle else REQUEST_SECONDS)

    def _after(self, seconds: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self.abort)

    def abort(self) -> None:
        self._transport.abort()


def _accepts_gzip(request: h11.Request) -> bool:
    codings = [value for name, value in request.headers if name == b"accept-encoding"]
    for coding in b",".join(codings).lower().split(b","):
        name, _, weight = coding.replace(b" ", b"").partition(b";q=")
        if name == b"gzip":
            return weight.strip(b"0.") != b"" if weight else True
    return False
