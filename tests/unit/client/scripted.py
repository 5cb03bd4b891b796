"""A server whose every word is scripted by the test: the daemon's side of the protocol on a real Unix socket.

A script is an async function of one Peer, an accepted connection. Server runs one script per connection, in order; the
last one serves all further connections. A failure in a script fails the test at the end of the ``async with``.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from colibri_protocol.connection import Connection, Role, negotiate
from colibri_protocol.errors import ConnectionFault
from colibri_protocol.message import Message
from colibri_protocol.messages import (
    Bye,
    Cancel,
    Credit,
    Done,
    Generate,
    LimitInfo,
    ModelInfo,
    Ping,
    Pong,
    TokensOut,
    Usage,
    Welcome,
)

MODEL = ModelInfo(name="tiny", id="a" * 64, fingerprint="b" * 64, vocab_size=256, max_len=1 << 20, eos_ids=(2,))
LIMITS = LimitInfo(frame=1 << 20, requests=64)
SECONDS = 20.0  # for things that happen soon; only a broken test waits so long


class Gone(Exception):  # noqa: N818
    """The client has closed its side."""


class Peer:
    """One connection, seen from the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        self.number = number
        self.connection = Connection(Role.SERVER)
        self.heard: list[tuple[Any, int]] = []  # all that the client has said
        self.reads = 0  # pieces in which it came
        self._reader, self._writer, self._events = reader, writer, iter(())

    async def next(self) -> tuple[Any, int]:
        """The next message and its id. Gone at the end of the stream."""
        while (event := next(self._events, None)) is None:
            try:
                data = await self._reader.read(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                raise Gone
            self.reads += 1
            self._events = iter(self.connection.receive(data))
        self.heard.append(tuple(event))
        return event.message, event.id

    async def expect(self, kind: type[Message]) -> tuple[Any, int]:
        """The next message, which must be of this kind."""
        message, request_id = await self.next()
        assert type(message) is kind, f"{message} instead of {kind.NAME}"
        return message, request_id

    async def expect_gone(self) -> list[Any]:
        """Reads to the end; what was said before it."""
        said = []
        try:
            while True:
                said.append((await self.next())[0])
        except (Gone, ConnectionFault):
            return said

    async def welcome(self, model: ModelInfo = MODEL, limits: LimitInfo = LIMITS, credit: bool = True) -> None:
        hello, _ = await self.next()
        proto, features = negotiate(hello)
        self.send(Welcome(proto=proto, features=features if credit else (), server="scripted 1", generation=1,
                          model=model, limits=limits))

    def count(self, kind: type[Message]) -> int:
        """How many messages of this kind have come."""
        return sum(type(message) is kind for message, _ in self.heard)

    def send(self, message: Message, request_id: int = 0) -> None:
        self.raw(self.connection.send(message, request_id))

    def raw(self, data: bytes) -> None:
        self._writer.write(data)

    def tokens(self, request_id: int, ids: list[int], index: int, **more: Any) -> None:
        self.send(TokensOut(ids=pack(ids), index=index, **more), request_id)

    def done(self, request_id: int, generated: int = 0, finish: str = "length", **more: Any) -> None:
        self.send(Done(finish_reason=finish, usage=Usage(generated=generated), **more), request_id)

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()


Script = Callable[[Peer], Awaitable[None]]


class Server:
    """``peers``: connections so far, the newest last."""

    def __init__(self, path: Path, *scripts: Script) -> None:
        self.path, self.peers = path, list[Peer]()
        self._scripts, self._tasks = scripts, list[asyncio.Task[None]]()
        self._numbers = itertools.count()

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_unix_server(self._accept, self.path)
        return self

    async def __aexit__(self, kind: Any, error: Any, traceback: Any) -> None:
        await self.stop()
        results = await asyncio.wait_for(asyncio.gather(*self._tasks, return_exceptions=True), SECONDS)
        faults = [r for r in results if isinstance(r, BaseException) and not isinstance(r, Gone)]
        if faults and error is None:
            raise faults[0]

    async def stop(self) -> None:
        """Listens no more; connections go on."""
        self._server.close()
        self.path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer, next(self._numbers))
        self.peers.append(peer)
        self._tasks.append(asyncio.ensure_future(self._serve(peer)))

    async def _serve(self, peer: Peer) -> None:
        try:
            await self._scripts[min(peer.number, len(self._scripts) - 1)](peer)
        finally:
            peer.close()


def pack(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def unpack(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}I", data))


# ---- a little daemon -----------------------------------------------------------------------------------------------


def oracle(prompt: list[int], seed: int | None, count: int) -> list[int]:
    """The "model": a token is a function of the prompt, the seed and its index."""
    return [(sum(prompt) * 31 + (seed or 0) * 17 + index * index + 7) % 251 for index in range(count)]


async def serve(peer: Peer, limits: LimitInfo = LIMITS, model: ModelInfo = MODEL,
                dies_after: int | None = None) -> None:
    """A script: answers GENERATE by the oracle, one token a frame, within credit; CANCEL and resume as the daemon does.
    dies_after: so many TOKENS frames on this connection, and it is gone."""
    await peer.welcome(model, limits)
    outputs: dict[int, Output] = {}
    sent = 0
    while True:
        message, request_id = await peer.next()
        if isinstance(message, Generate):
            outputs[request_id] = Output(message, limits.credit)
        elif isinstance(message, Credit) and request_id in outputs:
            outputs[request_id].credit += message.tokens
        elif isinstance(message, Cancel) and request_id in outputs:
            peer.done(request_id, outputs.pop(request_id).index, "abort")
        elif isinstance(message, Ping):
            peer.send(Pong(data=message.data), request_id)
        elif isinstance(message, Bye):
            return
        for key, output in list(outputs.items()):
            while output.credit and output.index < len(output.ids):
                if sent == dies_after:
                    await peer._writer.drain()
                    peer.close()
                    return
                peer.tokens(key, [output.ids[output.index]], output.index)
                output.index, output.credit, sent = output.index + 1, output.credit - 1, sent + 1
            if output.index == len(output.ids):
                peer.done(key, output.index, seed=output.seed)
                del outputs[key]


class Output:
    def __init__(self, message: Generate, credit: int) -> None:
        assert message.resume is None or message.resume.seed == (message.seed or 0)
        self.seed = message.seed or 0
        self.ids = oracle(unpack(message.tokens), message.seed, message.max_tokens)
        given = unpack(message.resume.tokens) if message.resume else []
        assert given == self.ids[: len(given)], "resume with other tokens than were sent"
        self.index, self.credit = len(given), credit


async def never_done(peer: Peer) -> None:
    """A script: ten tokens for each GENERATE, and DONE only on CANCEL."""
    await peer.welcome()
    while True:
        message, key = await peer.next()
        if isinstance(message, Generate):
            peer.tokens(key, list(range(10)), 0)
        elif isinstance(message, Cancel) and key in peer.connection.live:
            peer.done(key, 10, "abort")
        elif isinstance(message, Ping):
            peer.send(Pong(data=message.data), key)


async def until(condition: Callable[[], Any]) -> Any:
    """Polls until it holds; its value."""
    deadline = time.monotonic() + SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.002)
    return value
