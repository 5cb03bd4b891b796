"""Tokens through the socket are those of Engine.generate, whatever else the daemon is doing."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pytest
from colibri_client import AsyncClient
from colibri_engine import Engine
from fixtures.daemon import Daemon
from fixtures.models import Models

REQUESTS = 200
GROUPS = (1, 2, 4, 8, 16, 32)  # requests in flight at once


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    max_tokens: int
    sampling: dict[str, Any]


def random_case(rng: random.Random, vocab: int) -> Case:
    length = rng.choice((1, 2, 15, 16, 17, 63, 64, 65, 130, rng.randrange(1, 200)))
    prompt = [rng.randrange(vocab) for _ in range(length)]
    sampling: dict[str, Any] = {}
    if rng.random() < 0.6:
        sampling = {"temperature": rng.choice((0.5, 1.0, 1.7)), "seed": rng.getrandbits(64)}
        sampling |= rng.choice(({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.8}))
    if rng.random() < 0.3:
        sampling |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    if rng.random() < 0.2:
        sampling["logit_bias"] = {rng.randrange(vocab): rng.uniform(-5, 5) for _ in range(4)}
    return Case(prompt, rng.choice((1, 2, 5, 20, 60)), sampling)


@pytest.fixture(scope="module")
def cases(models: Models) -> list[tuple[Case, list[int]]]:
    """Random requests with what the engine alone makes of them."""
    rng = random.Random(20261201)
    with Engine.open(models.tiny("q4")) as engine:
        made = [random_case(rng, engine.info.vocab) for _ in range(REQUESTS)]
        return [(case, engine.generate(case.prompt, case.max_tokens, **case.sampling)) for case in made]


async def ask(client: AsyncClient, case: Case) -> list[int]:
    stream = client.generate(case.prompt, max_tokens=case.max_tokens, ignore_eos=True, **case.sampling)
    return [int(token) async for token in stream]


@pytest.mark.parametrize("workers", [1, 2])
async def test_socket_equals_engine(models: Models, cases: list[tuple[Case, list[int]]], workers: int) -> None:
    rng = random.Random(workers)
    with Daemon(models.tiny("q4"), workers=workers, threads=1) as daemon:
        async with AsyncClient(daemon.socket) as client:
            for width in GROUPS:
                picked = cases if width == 32 else rng.sample(cases, min(2 * width + 20, REQUESTS))
                for at in range(0, len(picked), width):
                    group = picked[at : at + width]
                    answers = await asyncio.gather(*(ask(client, case) for case, _ in group))
                    assert answers == [expected for _, expected in group]


async def test_requests_that_join_and_leave_at_any_step(models: Models, cases: list[tuple[Case, list[int]]]) -> None:
    """Not in waves: each request starts when a slot of 31 is free, so neighbours change at every step."""
    slots = asyncio.Semaphore(31)

    async def one(client: AsyncClient, case: Case) -> list[int]:
        async with slots:
            return await ask(client, case)

    with Daemon(models.tiny("q4"), workers=2, threads=1, max_seqs=16, step_tokens=24) as daemon:
        async with AsyncClient(daemon.socket) as client:
            answers = await asyncio.gather(*(one(client, case) for case, _ in cases))
    assert answers == [expected for _, expected in cases]
