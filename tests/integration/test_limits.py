"""Clients that do not read, too many connections for the descriptors there are, and everything accepted ends once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from colibri_client import AsyncClient, Client, errors
from colibri_engine import Engine
from colibri_protocol.connection import Connection, Role
from colibri_protocol.errors import Code
from colibri_protocol.messages import Error, Generate, Hello
from fixtures.daemon import PATIENCE, Daemon
from fixtures.models import Models

ATTENTION = {"pinned": 128, "window": 384}  # the tiny model's own
TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def daemon(models: Models) -> Iterator[Daemon]:
    with Daemon(models.tiny("q4"), workers=1, threads=1) as running:
        yield running


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def test_without_descriptors_it_turns_away_and_does_not_spin(daemon: Daemon) -> None:
    pid, opened = daemon.pid_of("dispatcher"), []
    with contextlib.ExitStack() as stack, Client(daemon.socket) as before:
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors(pid) + 3, limits[1]))
        for _ in range(12):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(PATIENCE)
            sock.connect(str(daemon.socket))
            opened.append(sock)
        connection = Connection(Role.CLIENT)
        connection.send(Hello(proto_min=1, proto_max=1))
        ((error, _),) = connection.receive(opened[-1].recv(4096))
        assert isinstance(error, Error)
        assert (error.code, error.retryable) == (Code.TOO_MANY_CONNECTIONS, True)
        assert before.stats().counters['connections_total{result="emfile"}'] >= 1
        waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
        waiting.connect(str(daemon.socket))
        used, begin = cpu_seconds(pid), time.monotonic()
        assert len(before.complete([5], max_tokens=300, ignore_eos=True).tokens) == 300
        time.sleep(1.0)
        assert cpu_seconds(pid) - used < 0.5 * (time.monotonic() - begin)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        with Client(daemon.socket) as after:
            assert after.complete([5], max_tokens=3).tokens


@pytest.mark.full  # a slow reader is given 10 s
def test_a_client_that_does_not_read_is_closed_and_others_are_not_slowed(daemon: Daemon, models: Models) -> None:
    with socket.socket(socket.AF_UNIX) as sock, Client(daemon.socket) as client:
        sock.connect(str(daemon.socket))
        connection = Connection(Role.CLIENT)
        sock.sendall(connection.send(Hello(proto_min=1, proto_max=1)))
        connection.receive(sock.recv(4096))
        asked = Generate(tokens=array("I", [5, 6]).tobytes(), max_tokens=100_000, ignore_eos=True, logprobs=20)
        sock.sendall(b"".join(connection.send(asked, request_id) for request_id in range(1, 9)))
        tokens = client.complete([7], max_tokens=2000, ignore_eos=True, temperature=0.8, seed=3).tokens
        daemon.until(lambda: client.stats().counters["slow_reader_disconnects_total"])
        daemon.until(lambda: not client.stats().running)
        assert client.stats().counters["output_buffer_bytes"] < 2 << 20
    with Engine.open(models.tiny("q4")) as engine:
        assert list(tokens) == engine.generate([7], 2000, temperature=0.8, seed=3, **ATTENTION)


async def test_what_was_started_has_finished(models: Models) -> None:
    """More than fits, cancelled and not, refused and not: started = the sum of the ends."""
    with Daemon(models.tiny("q4"), workers=1, threads=1, max_seqs=2, queue_requests=10) as daemon:
        async with AsyncClient(daemon.socket, retries=0) as client:

            async def ask(number: int) -> float | None:
                """None, or when it may come back."""
                stream = client.generate([number, 5], max_tokens=50 if number % 3 else 100_000, ignore_eos=True)
                try:
                    async for _ in stream:
                        if number % 3 == 0:
                            stream.cancel()
                except errors.Overloaded as e:
                    return e.retry_after or 0.0
                return None

            answers = await asyncio.gather(*(ask(number) for number in range(60)))
            async with asyncio.timeout(PATIENCE):
                while (stats := await client.stats()).running or stats.waiting:
                    await asyncio.sleep(0.01)
    counters = stats.counters
    finished = sum(value for name, value in counters.items() if name.startswith("request_success_total"))
    refused = [seconds for seconds in answers if seconds is not None]
    assert all(seconds > 0 for seconds in refused)
    assert counters["requests_started_total"] == finished == 60 - len(refused)
    assert counters['admission_rejections_total{reason="queue_full"}'] == len(refused) > 0
