"""Owners share the places: who comes while another has them all starts at once, and who gave way goes on with the same
bits."""

from __future__ import annotations

import asyncio
import os

from colibri_client import AsyncClient
from colibri_engine import Engine
from fixtures.daemon import Daemon
from fixtures.models import Models

ATTENTION = {"pinned": 128, "window": 384}  # the tiny model's own
PLACES, HOGS, LENGTH = 4, 12, 1500


async def hog(client: AsyncClient, number: int, got: list[int]) -> None:
    stream = client.generate([number, 5, 6], max_tokens=LENGTH, ignore_eos=True, temperature=0.9, seed=number,
                             tenant="hog")  # fmt: skip
    async for token in stream:
        got.append(int(token))


async def test_a_newcomer_starts_while_all_places_are_taken(models: Models) -> None:
    outputs: list[list[int]] = [[] for _ in range(HOGS)]
    with Daemon(models.tiny("q4"), workers=2, threads=1, max_seqs=PLACES // 2, trusted_uids=os.getuid()) as daemon:
        async with AsyncClient(daemon.socket) as client:
            hogs = [asyncio.ensure_future(hog(client, number, got)) for number, got in enumerate(outputs)]
            while (stats := await client.stats()).running < PLACES or stats.waiting < HOGS - PLACES:
                await asyncio.sleep(0.001)
            newcomers = [await client.complete([7, number], max_tokens=20, ignore_eos=True, tenant="newcomer")
                         for number in range(3)]  # fmt: skip
            assert not any(task.done() for task in hogs)
            assert [len(answer.tokens) for answer in newcomers] == [20] * 3
            await asyncio.gather(*hogs)
            counters = (await client.stats()).counters
        assert 1 <= counters["num_preemptions_total"] <= 3
        assert counters["requests_started_total"] == HOGS + 3
    with Engine.open(models.tiny("q4")) as engine:
        for number, got in enumerate(outputs):
            assert got == engine.generate([number, 5, 6], LENGTH, temperature=0.9, seed=number, **ATTENTION)


async def test_two_who_want_everything_do_not_push_each_other_out(models: Models) -> None:
    """The second one gets its half, and nobody is asked for a place again."""
    with Daemon(models.tiny("q4"), workers=1, threads=1, max_seqs=PLACES, trusted_uids=os.getuid()) as daemon:
        async with AsyncClient(daemon.socket) as client:
            answers = []
            for tenant in ("first", "second"):
                answers += [asyncio.ensure_future(client.complete([number, 9], max_tokens=600, ignore_eos=True,
                                                                  tenant=tenant)) for number in range(8)]  # fmt: skip
                while (stats := await client.stats()).running < PLACES or stats.waiting < len(answers) - PLACES:
                    await asyncio.sleep(0.001)
            await asyncio.gather(*answers)
            assert (await client.stats()).counters["num_preemptions_total"] == PLACES // 2
