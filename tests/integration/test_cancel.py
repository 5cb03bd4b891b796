"""CANCEL and disconnect in every phase of a request: it ends there, its memory comes back, neighbours see nothing."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from colibri_client import AsyncClient
from colibri_engine import Engine
from colibri_protocol.connection import Connection, Role
from colibri_protocol.errors import Code
from colibri_protocol.messages import Cancel, Done, Error, Generate, Hello, StatsReply, TokensOut
from fixtures.daemon import Daemon
from fixtures.models import Models

ATTENTION = {"pinned": 128, "window": 384}  # the tiny model's own
PATIENCE = 60.0
PLACES = 3


@pytest.fixture(scope="module")
def daemon(models: Models) -> Iterator[Daemon]:
    with Daemon(models.tiny("q4"), workers=1, threads=1, max_seqs=PLACES, slab_tokens=16) as running:
        yield running


class Wire:
    """A connection. say() sends all in one write, hear() gives (message, id) of whatever comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._conn, self._heard = Connection(Role.CLIENT), []  # type: ignore[var-annotated]

    def say(self, *messages: tuple[Any, int]) -> None:
        self.writer.write(b"".join(self._conn.send(message, request_id) for message, request_id in messages))

    async def hear(self) -> tuple[Any, int]:
        async with asyncio.timeout(PATIENCE):
            while not self._heard:
                self._heard += self._conn.receive(await self._reader.read(1 << 16))
        return self._heard.pop(0)

    async def end(self, request_id: int) -> tuple[int, Done | Error]:
        """Tokens and last message of a request; those of others are passed over."""
        count = 0
        while True:
            message, heard = await self.hear()
            if heard == request_id and isinstance(message, TokensOut):
                count += len(message.ids) // 4
            elif heard == request_id and isinstance(message, Done | Error):
                return count, message


@asynccontextmanager
async def wire(daemon: Daemon) -> AsyncIterator[Wire]:
    made = Wire(*await asyncio.open_unix_connection(str(daemon.socket)))
    try:
        made.say((Hello(proto_min=1, proto_max=1), 0))
        await made.hear()
        yield made
    finally:
        made.writer.close()
        await made.writer.wait_closed()


def generate(length: int = 3, max_tokens: int = 100_000, **fields: Any) -> Generate:
    tokens = array("I", [5 + n % 90 for n in range(length)]).tobytes()
    return Generate(tokens=tokens, max_tokens=max_tokens, ignore_eos=True, **fields)


async def settled(client: AsyncClient, condition: Any) -> StatsReply:
    async with asyncio.timeout(PATIENCE):
        while not condition(stats := await client.stats()):
            await asyncio.sleep(0.005)
        return stats


def at_rest(stats: StatsReply) -> bool:
    """Nothing runs, waits or holds memory."""
    return not stats.running and not stats.waiting and not stats.kv_slabs["live"]


async def test_while_it_waits_it_never_starts(daemon: Daemon) -> None:
    async with wire(daemon) as conn, AsyncClient(daemon.socket) as client:
        conn.say(*((generate(), request_id) for request_id in range(1, PLACES + 2)))
        await settled(client, lambda stats: stats.running == PLACES and stats.waiting == 1)
        conn.say((Cancel(), PLACES + 1))
        count, done = await conn.end(PLACES + 1)
        assert (count, done.finish_reason, done.worker, done.usage.generated) == (0, "abort", None, 0)
        conn.say(*((Cancel(), request_id) for request_id in range(1, PLACES + 1)))
        for request_id in range(1, PLACES + 1):
            assert (await conn.end(request_id))[1].finish_reason == "abort"
        await settled(client, at_rest)


@pytest.mark.parametrize("gone", [False, True])
async def test_in_prefill_within_a_chunk(daemon: Daemon, gone: bool) -> None:
    """Of 60,000 tokens most are never computed."""
    async with AsyncClient(daemon.socket) as client:
        before = int((await client.stats()).workers[0]["rows"])
        async with wire(daemon) as conn:
            conn.say((generate(60_000), 1))
            await settled(client, lambda stats: stats.workers[0]["rows"] > before)
            if not gone:
                conn.say((Cancel(), 1))
                assert (await conn.end(1))[1].finish_reason == "abort"
        stats = await settled(client, at_rest)
        assert before < stats.workers[0]["rows"] < before + 40_000


@pytest.mark.parametrize("gone", [False, True])
async def test_in_decode_within_a_step(daemon: Daemon, gone: bool) -> None:
    async with AsyncClient(daemon.socket) as client:
        before = int((await client.stats()).workers[0]["rows"])
        async with wire(daemon) as conn:
            conn.say((generate(), 1))
            await conn.hear()
            if not gone:
                conn.say((Cancel(), 1))
                count, done = await conn.end(1)
                assert done.finish_reason == "abort"
                assert done.usage.generated == count + 1
        stats = await settled(client, at_rest)
        assert stats.workers[0]["rows"] < before + 50_000


async def test_in_the_same_write(daemon: Daemon) -> None:
    """Also twice, with others between, and for an id that is used again at once."""
    async with wire(daemon) as conn, AsyncClient(daemon.socket) as client:
        conn.say((generate(), 1), (Cancel(), 1), (Cancel(), 1), (generate(max_tokens=7), 2), (generate(100), 3),
                 (Cancel(), 3))  # fmt: skip
        ends: dict[int, Done] = {}
        while len(ends) < 3:
            message, request_id = await conn.hear()
            if isinstance(message, Done):
                assert request_id not in ends
                ends[request_id] = message
        assert [ends[n].finish_reason for n in (1, 2, 3)] == ["abort", "length", "abort"]
        conn.say((generate(max_tokens=3), 1))
        count, done = await conn.end(1)
        assert (count, done.finish_reason) == (3, "length")
        await settled(client, at_rest)


async def test_by_its_deadline(daemon: Daemon) -> None:
    """Before the first token it is an error, after it a reason to finish."""
    async with wire(daemon) as conn, AsyncClient(daemon.socket) as client:
        conn.say((generate(100_000, 1, deadline_ms=200), 1))
        assert (await conn.end(1))[1].code == Code.DEADLINE_EXCEEDED
        conn.say((generate(deadline_ms=3000), 2))
        count, done = await conn.end(2)
        assert (done.finish_reason, done.usage.generated) == ("deadline", count)
        await settled(client, at_rest)


async def test_neighbours_are_the_same_to_the_bit(daemon: Daemon, models: Models) -> None:
    """A stream runs through while others beside it are cancelled in all phases."""
    options = {"max_tokens": 2000, "temperature": 0.9, "seed": 4}
    async with AsyncClient(daemon.socket) as client, wire(daemon) as conn:
        stream = client.generate([9, 8, 7], ignore_eos=True, **options)  # type: ignore[arg-type]
        got: list[int] = []
        number = 0
        async for token in stream:
            got.append(int(token))
            if len(got) % 40 == 0:
                number += 2
                conn.say((generate(2000 if number % 4 else 3), number), (generate(), number + 1))
                if number > 2:
                    conn.say((Cancel(), number - 2), (Cancel(), number - 1))
        conn.say((Cancel(), number), (Cancel(), number + 1))
        await settled(client, at_rest)
    with Engine.open(models.tiny("q4")) as engine:
        expected = engine.generate([9, 8, 7], 2000, temperature=0.9, seed=4, **ATTENTION)
    assert got == expected
