"""Random histories: whatever clients and workers do, each accepted request ends once, with the right tokens."""

from __future__ import annotations

import asyncio
import contextlib
import random
from array import array
from typing import Any

from colibri_daemon.common import ipc
from colibri_daemon.common.job import Job
from colibri_protocol.messages import Cancel, Done, Error, TokensOut
from dispatched import READY, VOCAB, Client, Rig, Worker, generate, on_uvloop, rig, until
from hypothesis import given, settings
from hypothesis import strategies as st

SLOTS, CLIENTS, REQUESTS = 2, 3, 8
LIVES_MOST = 400  # workers of a slot; seven have been seen


def token(prompt: bytes, index: int) -> int:
    """What the made-up model says."""
    return (prompt[0] * 7 + index * 3) % VOCAB


class Player:
    """A worker that computes that model, a token a step, until it dies; now and then a request has to give way."""

    def __init__(self, worker: Worker, life: int) -> None:
        self.worker, self.life, self.rows = worker, life, 0
        self.jobs: dict[int, tuple[Job, int]] = {}
        self.cancelled: dict[int, str] = {}

    async def play(self) -> None:
        await self.worker.say(ipc.READY, READY)
        with contextlib.suppress(EOFError, ConnectionError):
            for _ in range(self.life):
                await self._listen()
                if rows := [self._row(key) for key in list(self.jobs)]:
                    await self.worker.step(*rows)
                await asyncio.sleep(0)
        self.worker.die()

    async def _listen(self) -> None:
        while self.worker.waiting():
            tag, key, *rest = await self.worker.hear()
            if tag == ipc.ASSIGN:
                job = Job.from_wire(rest[0])
                self.jobs[key] = (job, len(job.generated) // 4)
            elif tag == ipc.CANCEL and key in self.jobs:
                self.cancelled[key] = rest[0]

    def _row(self, key: int) -> list[Any]:
        job, index = self.jobs[key]
        self.rows += 1
        if self.rows % 11 == 0:
            del self.jobs[key]
            self.cancelled.pop(key, None)
            return [key, b"", {"finish": "preempted", "generated": index}]
        if key in self.cancelled:
            del self.jobs[key]
            return [key, b"", {"finish": self.cancelled.pop(key), "generated": index}]
        ids = array("I", [token(job.tokens, index)]).tobytes()
        self.jobs[key] = (job, index + 1)
        if index + 1 < job.max_tokens:
            return [key, ids, None]
        del self.jobs[key]
        return [key, ids, {"finish": "length", "generated": index + 1}]


async def keep_workers(r: Rig, choice: random.Random) -> None:
    """What the supervisor does: a new worker for each that dies."""

    async def slot(number: int) -> None:
        for _ in range(LIVES_MOST):
            await Player(r.link(number), choice.randint(1, 40)).play()
        raise AssertionError("many workers lived, and the requests have not ended")

    await asyncio.gather(*(slot(number) for number in range(SLOTS)))


async def ask(client: Client, choice: random.Random) -> None:
    """A client's whole life; asserts what it is owed."""
    asked: dict[int, tuple[bytes, int]] = {}
    heard: dict[int, list[int]] = {}
    for request_id in range(1, REQUESTS + 1):
        message = generate(choice.randrange(VOCAB), max_tokens=choice.randint(0, 30), ignore_eos=True,
                           priority=choice.randint(-1, 1))  # fmt: skip
        await client.say(message, request_id)
        asked[request_id], heard[request_id] = (message.tokens, message.max_tokens), []
        if choice.random() < 0.3:
            await client.say(Cancel(), choice.randint(1, request_id))
    while asked:
        message, request_id = await client.hear()
        prompt, most = asked[request_id]
        output = heard[request_id]
        if isinstance(message, TokensOut):
            assert message.index == len(output)
            output += array("I", message.ids)
            assert len(output) <= most
            if choice.random() < 0.02:
                await client.say(Cancel(), request_id)
        else:
            assert isinstance(message, Done | Error)
            assert message.finish_reason in ("length", "abort")
            assert message.finish_reason == "abort" or len(output) == most
            assert output == [token(prompt, index) for index in range(len(output))]
            del asked[request_id]


async def walk_out(client: Client, choice: random.Random) -> None:
    """A client that leaves in the middle."""
    for request_id in range(1, REQUESTS + 1):
        await client.say(generate(choice.randrange(VOCAB), max_tokens=30, ignore_eos=True), request_id)
    for _ in range(choice.randint(0, 20)):
        await client.hear()
    client.sock.close()


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=25, deadline=None)
@on_uvloop
async def test_each_request_ends_once_with_its_tokens(seed: int) -> None:
    choice = random.Random(seed)
    async with rig(max_seqs=2, queue_requests=100) as r:
        r.requests.moves.fruitless_most = 1000  # many workers die here before they compute anything
        workers = asyncio.create_task(keep_workers(r, choice))
        clients = [await r.client() for _ in range(CLIENTS + 1)]
        await asyncio.gather(*(ask(client, choice) for client in clients[:-1]), walk_out(clients[-1], choice))
        await until(lambda: not r.requests.live)
        counters = (await clients[0].stats()).counters
        workers.cancel()
        finished = sum(n for name, n in counters.items() if name.startswith("request_success_total"))
        assert counters["requests_started_total"] == finished == REQUESTS * (CLIENTS + 1)
        assert not len(r.requests.queue)
        assert r.requests.queue.tokens == 0
        assert all(worker.promised == 0 and not worker.running for worker in r.workers)


@given(st.lists(st.binary(max_size=200), max_size=5))
@settings(max_examples=50, deadline=None)
@on_uvloop
async def test_random_bytes_hurt_nobody_else(pieces: list[bytes]) -> None:
    async with rig() as r:
        hostile, other = await r.client(), await r.client()
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                await hostile.raw(piece)
        await other.stats()
        hostile.sock.close()
        await until(lambda: len(r.sessions) == 1)
        await other.stats()
