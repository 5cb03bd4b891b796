"""The real dispatcher on uvloop, its sockets real, with scripted peers: clients that speak the protocol by
colibri_protocol, and workers and a KV pool that speak common/ipc.py and pool_ipc.py and do what a test tells them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import os
import resource
import select
import socket
import sys
import tempfile
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgpack
import uvloop
from colibri_daemon.common import ipc, pool_ipc
from colibri_daemon.common.facts import ModelFacts
from colibri_daemon.common.job import Job
from colibri_daemon.common.pages import Book, Page, make_pages
from colibri_daemon.common.settings import Settings
from colibri_daemon.dispatcher import main, workers
from colibri_daemon.dispatcher.main import Dispatcher
from colibri_daemon.dispatcher.pool_link import PoolLink
from colibri_daemon.dispatcher.session import Session, Timeouts
from colibri_protocol.connection import Connection, Role
from colibri_protocol.messages import Done, Error, Generate, Hello, Score, Stats, StatsReply, TokensOut, Welcome

SECONDS = 10.0  # for anything to happen
VOCAB, MAX_LEN, EOS = 100, 64, 2
FACTS = ModelFacts("folder", "made up", "a" * 64, "b" * 64, "llama", "q4", VOCAB, MAX_LEN, MAX_LEN, (EOS,), 0, 0,
                   "cache", "f16", 16, 4096, 1000)  # fmt: skip
READY = {"max_seqs": 4, "slabs": 64, "chunk": 32, "stall_ms": 100}
ENDS = (Done, Error)


def on_uvloop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test on the loop that the dispatcher has in production."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


def ids(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


async def until(condition: Callable[[], Any]) -> Any:
    """Waits for a truthy value."""
    async with asyncio.timeout(SECONDS):
        while not (value := condition()):
            await asyncio.sleep(0.002)
    return value


class Client:
    """One connection. said: the events received and not taken yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.conn, self.said = sock, Connection(Role.CLIENT), []  # type: ignore[var-annotated]
        self.ended = False  # the dispatcher has closed

    async def say(self, message: Any, request_id: int = 0) -> None:
        await self.raw(self.conn.send(message, request_id))

    async def raw(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def ask(self, body: dict[str, Any], request_id: int) -> None:
        """GENERATE with a body that colibri_protocol might not let us send."""
        self.conn.live.add(request_id)
        await self.raw(ipc.pack([Generate.TAG, request_id, body]))

    async def hear(self) -> tuple[Any, int]:
        """The next message; EOFError when there will be none."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(SECONDS):
            while not self.said:
                try:
                    data = b"" if self.ended else await loop.sock_recv(self.sock, 1 << 16)
                except ConnectionResetError:  # it closed without having read all of ours
                    data = b""
                if not data:
                    self.ended = True
                    raise EOFError
                self.said += self.conn.receive(data)
        return self.said.pop(0)

    async def hear_a(self, kind: type, request_id: int = 0) -> Any:
        message, heard_id = await self.hear()
        assert (type(message), heard_id) == (kind, request_id), message
        return message

    async def rest(self, request_id: int) -> list[Any]:
        """All messages of one request to its end; those of others must not come between."""
        messages = []
        while not messages or not isinstance(messages[-1], ENDS):
            message, heard_id = await self.hear()
            assert heard_id == request_id, message
            messages.append(message)
        return messages

    async def refused(self, message: Any, request_id: int = 1) -> Error:
        """The ERROR that answers a request at once."""
        await self.say(message, request_id)
        return await self.hear_a(Error, request_id)

    async def closed(self) -> None:
        """Nothing more is heard, and the dispatcher has closed."""
        try:
            message = await self.hear()
        except EOFError:
            return
        raise AssertionError(f"heard {message}")

    async def stats(self) -> StatsReply:
        await self.say(Stats())
        return await self.hear_a(StatsReply)


class Linked:
    """The other end of one of the dispatcher's links."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self._unframer, self._heard = sock, ipc.Unframer(), []  # type: ignore[var-annotated]

    async def say(self, *message: Any) -> None:
        await self.raw(ipc.pack(message))

    async def raw(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def hear(self) -> list[Any]:
        async with asyncio.timeout(SECONDS):
            while not self._heard:
                data = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16)
                if not data:
                    raise EOFError
                self._heard += self._unframer.feed(data)
        return self._heard.pop(0)

    def waiting(self) -> bool:
        """Something was said that has not been heard."""
        return bool(self._heard) or bool(select.select([self.sock], [], [], 0)[0])

    async def told(self, *message: Any) -> None:
        assert await self.hear() == list(message)

    def die(self) -> None:
        self.sock.close()


class Worker(Linked):
    """The worker's end of a link. dead: the "dead" message that die() makes the supervisor send."""

    steps = 0
    dead: Callable[..., None]

    def die(self, cause: str = "killed", keys: tuple[int, ...] = ()) -> None:
        super().die()
        self.dead(cause=cause, keys=keys)

    async def step(self, *rows: list[Any]) -> None:
        """Rows of one step: [key, ids or (), details or None]."""
        self.steps += 1
        await self.say(ipc.STEP, self.steps, list(rows), {"free": 60, "rows": len(rows), "us": 100, "misses": 0})

    async def assigned(self) -> tuple[int, Job]:
        tag, key, body = await self.hear()
        assert tag == ipc.ASSIGN, tag
        return key, Job.from_wire(body)


class Pool(Linked):
    """The KV pool's end of its link."""

    async def stats(self, free: int, cached: int = 0, **others: int) -> None:
        """others: slabs in other states. Those that are missing to 64 are leased."""
        states = {"free": free, "cached": cached, "committed": 0, "quarantined": 0} | others
        states.setdefault("leased", max(0, READY["slabs"] - sum(states.values())))
        await self.say(pool_ipc.STATS, {f'kv_slabs{{state="{state}"}}': count for state, count in states.items()})


class Rig:
    """page, control: what the supervisor has of the dispatcher."""

    def __init__(self, stack: contextlib.ExitStack, path: Path, settings: Settings, facts: ModelFacts,
                 timeouts: Timeouts, book: Book | None) -> None:
        self._stack, self.path = stack, path
        self.admin_path = path.with_name(f"{path.name}.admin")
        self.listener, admin = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        for sock, place in ((self.listener, path), (admin, self.admin_path)):
            sock.bind(str(place))
            sock.listen(128)
        self.control, theirs = ipc.control()
        stack.enter_context(self.control)
        self.page: Page = make_pages(1)[0]
        self.dispatcher = Dispatcher(asyncio.get_running_loop(), self.listener, admin, theirs, self.page, settings,
                                     facts, timeouts=timeouts, book=book)
        stack.callback(self.dispatcher.close)
        self._epoch = 0
        self.requests = self.dispatcher.requests

    @property
    def sessions(self) -> set[Session]:
        return self.dispatcher.server.sessions

    @property
    def paused(self) -> bool:
        return any(session.pausing for session in self.sessions)

    @property
    def closing(self) -> bool:
        return any(session.closing for session in self.sessions)

    @property
    def unread(self) -> int:
        """Bytes that wait for clients."""
        return sum(session.channel.buffered for session in self.sessions)

    async def dial(self, path: Path | None = None) -> Client:
        sock = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, str(path or self.path))
        return Client(sock)

    async def client(self, **hello: Any) -> Client:
        """A connection that has been welcomed."""
        client = await self.dial()
        await client.say(Hello(proto_min=1, proto_max=1, **hello))
        await client.hear_a(Welcome)
        return client

    async def dial_and_welcome(self) -> Welcome:
        client = await self.dial()
        await client.say(Hello(proto_min=1, proto_max=1))
        return await client.hear_a(Welcome)

    async def worker(self, slot: int = 0, generation: int = 1, pid: int = 0, page: int = 0, **ready: int) -> Worker:
        """A loaded worker. pid, page: of a process, and its page's index in the book."""
        worker = self.link(slot, generation, pid, page)
        await worker.say(ipc.READY, READY | ready)
        epoch = self._epoch
        await until(lambda: any(w.loaded and w.epoch == epoch for w in self.workers))
        return worker

    @property
    def workers(self) -> list[workers.Worker]:
        return list(self.dispatcher.generations.workers())

    @property
    def pool_link(self) -> PoolLink:
        """Of the generation that serves."""
        return self.dispatcher.generations.serving.pool

    def link(self, slot: int = 0, generation: int = 1, pid: int = 0, page: int = 0) -> Worker:
        """A worker that has not loaded yet."""
        ours, theirs = ipc.link()
        self._stack.enter_context(ours)
        self._epoch += 1
        process = {"slot": slot, "epoch": self._epoch}
        self.tell({"t": "worker", "generation": generation, "pid": pid or 1000 + slot, "page": page, **process},
                  (theirs.fileno(),))
        theirs.close()
        worker = Worker(ours)
        worker.dead = lambda **how: self.tell({"t": "dead", **process, **how})
        return worker

    async def pool(self, free: int = 64, number: int = 1, **states: int) -> Pool:
        """A KV pool with so many slabs."""
        ours, theirs = ipc.link()
        self._stack.enter_context(ours)
        self.tell({"t": "pool", "pool": number, "slot": 0, "epoch": 1}, (theirs.fileno(),))
        theirs.close()
        pool, link = Pool(ours), self.dispatcher.generations.pool(number)
        link.available = None
        await pool.stats(free, **states)
        await until(lambda: link.available is not None)
        return pool

    def tell(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        assert ipc.send_control(self.control, message, fds)

    def told_already(self) -> bool:
        """The dispatcher has said something beyond "ready" that was not heard yet."""
        try:
            return b"ready" not in self.control.recv(4096) or bool(self.control.recv(4096))
        except BlockingIOError:
            return False

    async def told(self) -> str:
        """What the dispatcher says to the supervisor."""
        packet = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.control, 4096), SECONDS)
        return msgpack.unpackb(packet)["t"] if packet else "gone"


@contextlib.asynccontextmanager
async def rig(facts: ModelFacts = FACTS, timeouts: Timeouts | None = None, book: Book | None = None,
              **settings: Any) -> AsyncIterator[Rig]:
    """settings: those that differ from the defaults. An exception that reaches the loop fails the test."""
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="colibri-"))
        yield Rig(stack, Path(folder) / "s", Settings(**settings), facts, timeouts or Timeouts(), book)
    assert not errors


def generate(*tokens: int, **fields: Any) -> Generate:
    return Generate(tokens=ids(*tokens or (5, 6, 7)), **fields)


def score(*tokens: int, **fields: Any) -> Score:
    return Score(tokens=ids(*tokens or (5, 6, 7)), **fields)


def tokens_of(messages: list[Any]) -> list[int]:
    """The output in TOKENS messages, which must be without gap or overlap."""
    output: list[int] = []
    for message in messages:
        if isinstance(message, TokensOut):
            output += array("I", message.ids)
    return output


def facts(**changes: Any) -> ModelFacts:
    return dataclasses.replace(FACTS, **changes)


LONG = {"facts": facts(max_len=1 << 16)}


def prompt(slabs: int, **fields: int) -> Generate:
    """A request whose prompt fills so many slabs; it needs one more for output."""
    return generate(*[1] * (16 * slabs), **{"max_tokens": 100, "ignore_eos": True} | fields)


async def three(r: Rig, **pool: int) -> tuple[Worker, Client, Pool]:
    """One of each; the pool with so many slabs in these states."""
    return await r.worker(slabs=64), await r.client(), await r.pool(**pool)


@contextlib.contextmanager
def no_descriptors() -> Any:
    """Within it, this process cannot open anything more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # what is collected later would make room
    highest = max(map(int, os.listdir("/proc/self/fd")))
    fillers = [os.dup(0)]  # of the gaps: a descriptor above the limit makes no room when it is closed
    while fillers[-1] < highest:
        fillers.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in fillers:
            os.close(fd)


if __name__ == "__main__":  # for test_dispatcher_process.py: descriptors of both listening sockets and of control
    _listener, _admin, _control = (socket.socket(fileno=int(argument)) for argument in sys.argv[1:])
    sys.exit(main.run(_listener, _admin, _control, make_pages(1)[0], Settings(), FACTS))
