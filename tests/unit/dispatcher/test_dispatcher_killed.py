"""A worker is killed, and the dispatcher learns of it before the link ends, from a real process that arms its page.
Here its link never ends by itself: this test holds the other end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

from colibri_daemon.common import pool_ipc
from colibri_daemon.common.metrics import Source
from colibri_daemon.common.pages import Book, Field
from colibri_protocol.messages import Done, TokensOut
from dispatched import Client, Pool, Rig, Worker, generate, ids, on_uvloop, rig, tokens_of, until

MOMENT = 0.3  # for what must not happen
PROCESS = """
import os, sys
from colibri_daemon.common import life
from colibri_daemon.common.pages import Page
life.arm(Page.open(int(sys.argv[1]), int(sys.argv[2])))
print(flush=True)
sys.stdin.read()
os._exit(3)
"""


class Scene:
    """A stream with three tokens in worker 0, which is this process; a second worker; the pool."""

    def __init__(self, r: Rig, process: subprocess.Popen[bytes], first: Worker, second: Worker, client: Client,
                 pool: Pool, key: int) -> None:  # fmt: skip
        self.r, self.process, self.first, self.second, self.client = r, process, first, second, client
        self.pool, self.key = pool, key
        (worker,) = (w for w in r.workers if w.slot == 0)
        self.id = worker.id

    async def goes_on(self, *more: int, early: bool = True) -> None:
        """In the second worker, behind all that the first one has said. early: the pool was told by the dispatcher."""
        if early:
            await self.pool.told(pool_ipc.KILLED, list(self.id))
        key, rest = await self.second.assigned()
        assert (key, rest.generated) == (self.key, ids(10, 11, *more))
        await self.second.step([key, ids(12), {"finish": "length", "generated": 3 + len(more)}])
        messages = await self.client.rest(1)
        assert tokens_of(messages) == [11, *more, 12]
        assert isinstance(messages[-1], Done)

    async def nothing_happens(self) -> None:
        await asyncio.sleep(MOMENT)
        assert not self.second.waiting()
        assert not self.pool.waiting()


@contextlib.asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    book = Book.make(4)
    page = book.take(Source.WORKER.value)
    arguments = [sys.executable, "-c", PROCESS, str(book.fd), str(page.place[1])]
    with subprocess.Popen(arguments, pass_fds=[book.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            async with rig(book=book) as r:
                pool, client = await r.pool(), await r.client()
                first = await r.worker(0, pid=process.pid, page=page.place[1])
                await client.say(generate(max_tokens=9), 1)
                key, _ = await first.assigned()
                second = await r.worker(1)
                await first.step([key, ids(10), None])
                await client.hear_a(TokensOut, 1)
                page[Field.KEYS] = key
                await first.step([key, ids(11), None])
                yield Scene(r, process, first, second, client, pool, key)
        finally:
            process.kill()
    os.close(book.fd)


@on_uvloop
async def test_its_streams_move_at_once() -> None:
    async with scene() as s:
        await s.first.step([s.key, ids(20), None])  # its last words
        s.process.kill()
        await s.goes_on(20)
        assert s.r.dispatcher.server.stats.get("request_takeovers_total") == 1
        s.first.dead(cause="killed", keys=[s.key])  # is no news
        s.r.tell({"t": "dead", "slot": 7, "epoch": 7, "cause": "killed", "keys": []})
        await until(lambda: (7, 7) in s.r.requests.moves._losses._deaths)
        assert len(s.r.requests.moves._losses._deaths) == 1


@on_uvloop
async def test_even_if_its_link_has_ended_by_then() -> None:
    """Which alone says nothing: it may have ended in any way."""
    async with scene() as s:
        s.first.sock.close()
        await until(lambda: not any(w.slot == 0 for w in s.r.workers))
        await s.nothing_happens()
        s.process.kill()
        await s.goes_on()


@on_uvloop
async def test_another_end_is_told_by_the_supervisor_alone() -> None:
    for end in (lambda p: p.stdin.close(), lambda p: p.send_signal(signal.SIGABRT)):
        async with scene() as s:
            end(s.process)
            await asyncio.to_thread(os.waitid, os.P_PID, s.process.pid, os.WEXITED | os.WNOWAIT)
            await s.nothing_happens()
            s.first.die("exit", keys=(s.key,))
            await s.goes_on(early=False)


@on_uvloop
async def test_what_the_supervisor_ends_it_tells_itself() -> None:
    """A worker that hangs is killed too in the end, but a request in its step is under suspicion then."""
    async with scene() as s:
        s.r.tell({"t": "doomed", "slot": 0, "epoch": s.id[1]})
        s.process.kill()
        await s.nothing_happens()
        s.first.die("hang", keys=(s.key,))
        await s.second.assigned()
        (stream,) = s.r.dispatcher.generations.serving.streams.values()
        assert stream.struck_at == 2


@on_uvloop
async def test_a_stopped_worker_keeps_its_streams() -> None:
    async with scene() as s:
        s.process.send_signal(signal.SIGSTOP)
        await s.nothing_happens()
        assert [w.slot for w in s.r.workers if w.running] == [0]
        s.process.kill()
        await s.goes_on()


@on_uvloop
async def test_a_page_of_another_process_by_now_says_nothing() -> None:
    """It was reaped and its page cleared before we came to look."""
    async with scene() as s:
        worker = next(w for w in s.r.workers if w.slot == 0)
        s.process.kill()
        s.process.wait()
        s.r.dispatcher._ended(worker)
        assert worker.running
        s.first.die(keys=(s.key,))
        await s.goes_on(early=False)
