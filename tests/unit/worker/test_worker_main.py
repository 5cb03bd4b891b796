"""A worker as a process: loading, READY, serving, and how it ends."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from colibri_daemon.common import ipc
from colibri_daemon.common.arena import Arena
from colibri_daemon.common.exit_codes import Exit
from colibri_daemon.common.job import Job
from colibri_daemon.common.settings import Settings
from colibri_daemon.worker.check import check
from colibri_engine import Engine
from colibri_engine.binding import lib
from fixtures.models import Models
from fixtures.pool import SECONDS, PoolThread

# argv: descriptors of link and control, settings, changes to the facts, geometry of the arena
SCRIPT = """
import json, socket, sys
from dataclasses import replace
from colibri_daemon.common.arena import Arena
from colibri_daemon.common.pages import Field, State, make_pages
from colibri_daemon.common.settings import Settings
from colibri_daemon.supervisor.weights import WeightFiles
from colibri_daemon.worker import check, main

link, control = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])
settings, page = Settings(**json.loads(sys.argv[3])), make_pages(1)[0]
facts = replace(check.check(settings), **json.loads(sys.argv[4]))
arena = Arena(**json.loads(sys.argv[5]))
code = main.run(link, control, page, settings, facts, arena, WeightFiles.open(facts).files)
if code == 0:
    assert page[Field.LOADED] == page[Field.TO_LOAD] == facts.weight_bytes
    assert page[Field.STATE] == State.STOPPING and page[Field.PROGRESS] and page[Field.SLABS]
sys.exit(code)
"""


class Peers:
    """The dispatcher's and the supervisor's ends."""

    def __init__(self, link: socket.socket, control: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.link, self.control, self.process = link, control, process
        self._unframer = ipc.Unframer()
        self._messages: list[Any] = []

    def message(self) -> Any:
        """The next one on the link."""
        while not self._messages:
            assert select.select([self.link], [], [], SECONDS)[0], "nothing came"
            data = self.link.recv(1 << 16)
            assert data
            self._messages += self._unframer.feed(data)
        return self._messages.pop(0)

    def told(self) -> dict[str, Any]:
        """The next packet on control."""
        assert select.select([self.control], [], [], SECONDS)[0], "nothing came"
        packet = ipc.receive_control(self.control)
        assert packet is not None
        return packet[0]

    def exit_code(self) -> int:
        return self.process.wait(SECONDS)


SLABS = 40


@contextmanager
def started(folder: Path, facts: dict[str, Any] | None = None, arena: dict[str, Any] | None = None,
            log: Path | None = None, **settings: Any) -> Iterator[Peers]:
    """With a pool. facts, arena: what the worker is told that is not so. log: where its lines go."""
    pool = PoolThread(Arena.make(SLABS, check(Settings(model=folder))))
    pairs = ipc.link(), ipc.control()
    theirs = [pair[1].fileno() for pair in pairs]
    words = {"model": str(folder), "threads": 1} | settings, facts or {}, asdict(pool.arena) | (arena or {})
    with (log or Path(os.devnull)).open("wb") as stderr:
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, *map(str, theirs), *map(json.dumps, words)],
                                   pass_fds=[*theirs, pool.arena.fd], stderr=stderr)  # fmt: skip
    with pool.connect(0, 1) as link:
        assert ipc.send_control(pairs[1][0], {"t": "pool", "slot": 0, "epoch": 1}, (link.fileno(),))
    try:
        for pair in pairs:
            pair[1].close()
        yield Peers(pairs[0][0], pairs[1][0], process)
    finally:
        process.kill()
        process.wait()
        pool.close()
        for pair in pairs:
            pair[0].close()


@pytest.fixture(scope="module")
def folder(models: Models) -> Path:
    return models.tiny("q4")


def test_more_threads_than_cores_are_told(folder: Path, tmp_path: Path) -> None:
    """It serves, and its log says so; a right setting is not remarked on. Its words: Settings.crowding."""
    cores, log = lib.colibri_host_threads(), tmp_path / "log"
    for threads, workers, told in ((cores, 1, False), (cores + 1, 1, True), (cores, 2, True)):
        with started(folder, log=log, threads=threads, workers=workers) as peers:
            assert peers.message()[0] == ipc.READY
        assert ("more engine threads than cores" in log.read_text()) == told


def test_it_loads_serves_and_stops(folder: Path) -> None:
    prompt = [5, 6, 7, 8]
    with started(folder, max_seqs=5) as peers:
        tag, ready = peers.message()
        assert (tag, ready["max_seqs"]) == (ipc.READY, 5)
        with Engine.open(folder) as engine:
            assert ready["slabs"] == SLABS
            expected = engine.generate(prompt, 30, temperature=0.8, seed=4, pinned=128, window=384)
        assert 8 <= ready["chunk"] <= 512
        assert ready["stall_ms"] >= 100
        assert 8 <= ready["gentle_chunk"] <= ready["chunk"]
        assert peers.told() == {"t": "ready", "threads": 1, "chunk": ready["chunk"], "isa": ready["isa"],
                                "gentle_chunk": ready["gentle_chunk"], "stall_ms": ready["stall_ms"]}
        job = Job(np.array(prompt, "<u4").tobytes(), 30, temperature=0.8, seed=4, pinned=128, window=384)
        peers.link.send(ipc.pack([ipc.ASSIGN, 1, job.to_wire()]))
        found = b""
        while True:
            _, _, rows, _ = peers.message()
            found += b"".join(row[1] for row in rows)
            if any(row[2] and "finish" in row[2] for row in rows):
                break
        assert np.frombuffer(found, "<u4").tolist() == expected
        peers.process.send_signal(signal.SIGTERM)
        assert peers.exit_code() == Exit.STOPPED


def test_a_chunk_as_configured(folder: Path) -> None:
    with started(folder, step_tokens=33, max_seqs=2, workers=3) as peers:
        assert peers.message()[1]["chunk"] == 33


@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_at_once_with_its_supervisor(folder: Path, busy: bool) -> None:
    with started(folder) as peers:
        assert peers.message()[0] == ipc.READY
        if busy:
            job = Job(np.arange(9, dtype="<u4").tobytes(), 100_000, window=100)
            peers.link.send(ipc.pack([ipc.ASSIGN, 1, job.to_wire()]))
            peers.message()
        peers.control.close()
        assert peers.exit_code() == Exit.STOPPED


@pytest.mark.parametrize(
    ("facts", "arena", "reason"),
    [
        ({"files": []}, {}, "manifest.json: is not among the open files"),
        ({}, {"slabs": SLABS + 1}, "the KV arena has"),
        ({}, {"fd": 0}, "Invalid argument"),
    ],
)
def test_what_cannot_be_loaded(folder: Path, facts: dict[str, Any], arena: dict[str, Any], reason: str) -> None:
    with started(folder, facts, arena) as peers:
        told = peers.told()
        assert told["t"] == "failed"
        assert reason in told["reason"]
        assert peers.exit_code() == Exit.CANNOT_LOAD


def test_sigterm_while_it_loads(folder: Path) -> None:
    """It ends either way: by the signal, before it listens to it, or as asked."""
    with started(folder) as peers:
        os.kill(peers.process.pid, signal.SIGTERM)
        assert peers.exit_code() in (-signal.SIGTERM, Exit.STOPPED)
