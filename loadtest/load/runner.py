"""Sends a scenario's requests over a transport and notes when what came."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from .arrivals import Closed
from .requests import Request, requests, warmup
from .scenario import Scenario


class RequestError(Exception):
    """A request that was refused or broke off. ``str()`` is a short reason, the same for all that failed alike."""


@dataclass(slots=True)
class Record:
    """What became of a request. due, sent, end, arrivals: seconds from the beginning of the run; due is what latencies
    count from. tokens: received. failure: a reason, or None."""

    request: Request
    due: float
    begin: float
    sent: float = 0.0
    end: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    left: bool = False
    failure: str | None = None

    def arrived(self, tokens: int) -> bool:
        """Notes that so many tokens came now; whether the transport is to go on."""
        self.arrivals.append(time.monotonic() - self.begin)
        self.tokens += tokens
        leave = self.request.leave_after
        self.left = leave is not None and self.tokens >= leave
        return not self.left


class Transport(Protocol):
    """A server that can be driven."""

    async def open(self) -> int:
        """Connects; the size of the vocabulary."""
        ...

    async def send(self, request: Request, record: Record) -> None:
        """Runs one request to its end, calling record.arrived() as tokens come, and ends it there when that says so.
        RequestError if it failed."""
        ...

    async def close(self) -> None: ...


@dataclass
class Run:
    """seconds: from the beginning to the last end. cores: what this process used of them meanwhile."""

    records: list[Record]
    seconds: float
    cores: float


async def drive(transport: Transport, scenario: Scenario, *, timeout: float = 600.0) -> Run:
    """The whole scenario, warm-up first. timeout: seconds until a request counts as failed."""
    vocab = await transport.open()
    try:
        early = time.monotonic()
        await asyncio.gather(*(_one(transport, Record(r, 0.0, early), timeout) for r in warmup(scenario, vocab)))
        closed = isinstance(scenario.arrival, Closed)
        asked = requests(scenario, vocab)
        begin, used = time.monotonic(), _own_cpu()
        records = await (_closed if closed else _open)(transport, scenario, asked, timeout)
        seconds = time.monotonic() - begin
        return Run(records, seconds, (_own_cpu() - used) / seconds)
    finally:
        await transport.close()


async def _closed(transport: Transport, scenario: Scenario, asked: Iterator[Request], timeout: float) -> list[Record]:
    """Each client takes the next request when its last has ended."""
    assert isinstance(scenario.arrival, Closed)
    records: list[Record] = []
    begin = time.monotonic()

    async def client() -> None:
        for request in asked:
            now = time.monotonic() - begin
            if scenario.seconds is not None and now >= scenario.seconds:
                return
            records.append(Record(request, now, begin))
            await _one(transport, records[-1], timeout)

    await asyncio.gather(*(client() for _ in range(scenario.arrival.clients)))
    return records


async def _open(transport: Transport, scenario: Scenario, asked: Iterator[Request], timeout: float) -> list[Record]:
    """Requests leave when they are due, whether or not earlier ones have ended, and a latency counts from then."""
    made = list(asked)
    begin = time.monotonic()
    records = [Record(request, request.due or 0.0, begin) for request in made]
    async with asyncio.TaskGroup() as group:
        for record in records:
            if (wait := begin + record.due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            group.create_task(_one(transport, record, timeout))
    return records


async def _one(transport: Transport, record: Record, timeout: float) -> None:
    record.sent = time.monotonic() - record.begin
    try:
        async with asyncio.timeout(timeout):
            await transport.send(record.request, record)
        if not record.tokens:
            record.failure = "no tokens"
    except TimeoutError:
        record.failure = "timeout"
    except RequestError as e:
        record.failure = str(e)
    record.end = time.monotonic() - record.begin


def _own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
