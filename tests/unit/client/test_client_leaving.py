"""Daemons that leave or change: GOAWAY, DRAINING, another model; and a client that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from colibri_client import AsyncClient, errors
from colibri_client.retry import Policy
from colibri_protocol.errors import Code
from colibri_protocol.messages import (
    Bye,
    Error,
    Generate,
    GoAway,
    Health,
    HealthReply,
    Model,
)
from fixtures.scripted_server import MODEL, Peer, Server, oracle, serve, until

PROMPT = [1, 2, 3]
Quick = Callable[..., AsyncClient]


async def test_goaway_lets_old_streams_end_and_sends_new_ones_elsewhere(path: Path) -> None:
    go, end = asyncio.Event(), asyncio.Event()

    async def leaves(peer: Peer) -> None:
        await peer.welcome()
        _, key = await peer.expect(Generate)
        peer.tokens(key, [1], 0)
        await go.wait()
        peer.send(GoAway(reason="drain", last_id=key, deadline_ms=30_000))
        await end.wait()
        peer.tokens(key, [2], 1)
        peer.done(key, 2)
        assert await peer.expect_gone() == [Bye()]

    async with Server(path, leaves, serve) as server, AsyncClient(path) as client:
        stream = client.generate(PROMPT)
        assert await anext(stream) == 1
        go.set()
        await until(lambda: client._session.current is None)
        assert (await client.complete(PROMPT, max_tokens=3)).tokens == oracle(PROMPT, 0, 3)
        end.set()
        assert [token async for token in stream] == [2]
        assert len(server.peers) == 2


async def test_draining_goes_on_at_the_next_daemon(path: Path, quick: Quick) -> None:
    async def drains(peer: Peer) -> None:
        await peer.welcome()
        _, key = await peer.expect(Generate)
        peer.tokens(key, oracle(PROMPT, 0, 2), 0)
        peer.send(Error(code=Code.DRAINING, message="the daemon is stopping", tokens_sent=2), key)
        await peer.expect_gone()

    async with Server(path, drains, serve) as server, quick() as client:
        assert (await client.complete(PROMPT, max_tokens=5)).tokens == oracle(PROMPT, 0, 5)
        assert len(server.peers) == 2


async def test_draining_with_no_next_daemon_says_draining(path: Path, quick: Quick) -> None:
    async def drains(peer: Peer) -> None:
        await peer.welcome()
        _, key = await peer.expect(Generate)
        await server.stop()
        peer.send(Error(code=Code.DRAINING, message="the daemon is stopping"), key)
        await peer.expect_gone()

    async with Server(path, drains) as server, quick(Policy(reconnect=0.05, base=0.001)) as client:
        with pytest.raises(errors.Draining):
            await client.complete(PROMPT)


async def test_a_new_model_is_noticed(path: Path) -> None:
    other = replace(MODEL, name="other")

    async def reloads(peer: Peer) -> None:
        await peer.welcome()
        peer.send(Model(generation=2, model=other))
        while True:
            message, key = await peer.next()
            if isinstance(message, Health):
                peer.send(HealthReply(live=True, ready=True, state="ready"), key)

    async with Server(path, reloads), AsyncClient(path) as client:
        await client.health()
        assert client.model == other


async def test_closing_does_not_wait_for_a_server_that_does_not_read(path: Path) -> None:
    release = asyncio.Event()

    async def stuck(peer: Peer) -> None:
        await peer.welcome()
        await release.wait()

    async with Server(path, stuck), AsyncClient(path) as client:
        streams = [client.generate(bytes(900_000)) for _ in range(8)]
        await asyncio.sleep(0)
        await client.close()
        for stream in streams:
            with pytest.raises(errors.ClientClosed):
                await anext(stream)
        release.set()
