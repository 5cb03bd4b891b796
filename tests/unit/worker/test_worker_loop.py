"""The worker's loop at its edges: what ends it, what it refuses, when it waits. Tokens are property/test_batching's."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import crc32c
import numpy as np
import pytest
from colibri_daemon.common import ipc
from colibri_daemon.common.job import Job
from colibri_daemon.common.pages import Field
from colibri_daemon.kvpool import server
from colibri_daemon.worker import loop
from colibri_engine import Engine
from colibri_protocol.errors import Code
from fixtures.models import Models
from fixtures.worker import SECONDS, Dispatcher, poisoned, worker

VOCAB = 64
PROMPT = list(range(1, 8))


def packed(ids: list[int]) -> bytes:
    return np.asarray(ids, "<u4").tobytes()


JOB = Job(packed(PROMPT), max_tokens=20)
ENDLESS, LONG = Job(packed(PROMPT), max_tokens=500_000, window=64), 1 << 20


@pytest.fixture(scope="module")
def folder(models: Models) -> Path:
    return models.random({"vocab": VOCAB, "layers": 1})


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    with Engine.open(folder) as engine:
        return engine.generate(PROMPT, 20)


def eventually(done: Callable[[], bool], reader: Dispatcher | None = None) -> None:
    """Waits for what is not said on the link; reader keeps the link empty meanwhile."""
    deadline = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < deadline
        if reader is None or not reader.read(0):
            time.sleep(0)


# ---- what ends it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [0, 3])
def test_it_ends_with_the_supervisor(folder: Path, jobs: int) -> None:
    with worker(folder, max_context=LONG) as w:
        for key in range(1, jobs + 1):
            w.assign(key, ENDLESS)
        if jobs:
            w.until(lambda: bool(w.outputs[1].ids))
        w.control.shutdown(socket.SHUT_RDWR)
        w.thread.join(SECONDS)
        assert not w.thread.is_alive()


@pytest.mark.parametrize("jobs", [0, 3])
@pytest.mark.parametrize("early", [True, False], ids=["link first", "end of file first"])
def test_a_new_dispatcher_finds_an_empty_worker(folder: Path, expected: list[int], jobs: int, early: bool) -> None:
    """What the old one wanted is dropped, its slabs are free, and the next one is greeted and served."""
    with worker(folder, max_context=LONG) as w:
        for key in range(1, jobs + 1):
            w.assign(key, ENDLESS)
        w.until(lambda: w.greetings == 1 and (not jobs or bool(w.outputs[1].ids)))
        old, (ours, theirs) = w.sock, ipc.link()
        if not early:
            old.shutdown(socket.SHUT_RDWR)
            w.pool.until(lambda: w.pool.idle)
        assert ipc.send_control(w.control, {"t": "link"}, (theirs.fileno(),))
        theirs.close()
        with ours:
            w.change_link(ours)
            assert w.run({9: JOB})[9].ids == expected
            assert w.greetings == 2
            w.change_link(old)


def test_a_packet_on_control_is_no_end(folder: Path, expected: list[int]) -> None:
    with worker(folder) as w:
        assert ipc.send_control(w.control, {"t": "hello"})
        assert w.run({1: JOB})[1].ids == expected


# ---- what it refuses, without anybody else noticing ------------------------------------------------------------------

BAD = {
    "a token that is none": Job(packed([1, VOCAB]), 5),
    "no token": Job(b"", 5),
    "half a token": Job(b"\x01\x00", 5),
    "too long": Job(packed(PROMPT), 4090),
    "no such position mode": Job(packed(PROMPT), 5, positions="relative"),
    "pinned without a window": Job(packed(PROMPT), 5, pinned=3),
    "bad output so far": Job(packed(PROMPT), 5, generated=packed([VOCAB])),
    "scores from nowhere": Job(packed(PROMPT), score_from=9),
    "a number that is none": Job(packed(PROMPT), 5, top_p=float("nan")),
    "a bias for no token": Job(packed(PROMPT), 5, logit_bias={VOCAB: 1.0}),
}


@pytest.mark.parametrize("what", BAD)
def test_a_job_that_cannot_be_run(folder: Path, expected: list[int], what: str) -> None:
    with worker(folder) as w:
        outputs = w.run({1: JOB, 2: BAD[what], 3: JOB})
        assert outputs[1].ids == outputs[3].ids == expected
        finish = outputs[2].finish
        assert finish is not None
        assert (finish["finish"], finish["error"][0], finish["generated"]) == ("error", Code.INVALID_ARGUMENT, 0)
        assert finish["error"][1]
        w.pool.until(lambda: w.pool.idle)


def test_fields_that_are_none(folder: Path, expected: list[int]) -> None:
    with worker(folder) as w:
        w.send([ipc.ASSIGN, 1, {"tokens": packed(PROMPT), "colour": "red"}], [ipc.ASSIGN, 2, JOB.to_wire()])
        w.until(lambda: w.ended == {1, 2})
        assert w.outputs[1].finish is not None
        assert w.outputs[1].finish["error"][0] == Code.INVALID_ARGUMENT
        assert w.outputs[2].ids == expected


def test_one_that_overflows_ends_alone(folder: Path, tmp_path: Path, expected: list[int]) -> None:
    said = set(expected) | set(PROMPT)
    token = next(token for token in range(VOCAB) if token not in said)
    with worker(poisoned(folder, tmp_path / "model", token)) as w:
        outputs = w.run({1: JOB, 2: Job(packed([3, token, 4]), 9), 3: JOB})
        assert outputs[1].ids == outputs[3].ids == expected
        assert outputs[2].finish is not None
        assert outputs[2].finish["error"][0] == Code.NON_FINITE
        w.pool.until(lambda: w.pool.idle)
        assert w.run({4: JOB})[4].ids == expected  # in slabs that the other left


# ---- leaving and waiting ---------------------------------------------------------------------------------------------


def test_cancel_in_the_same_write(folder: Path) -> None:
    with worker(folder, max_context=LONG) as w:
        w.send([ipc.ASSIGN, 1, ENDLESS.to_wire()], [ipc.CANCEL, 1, "abort"], [ipc.CANCEL, 99, "abort"])
        w.until(lambda: w.ended == {1})
        assert w.outputs[1].ids == []
        assert w.outputs[1].finish == {"finish": "abort", "generated": 0}
        w.pool.until(lambda: w.pool.idle)


def test_a_stop_sequence_that_never_ends_holds_everything_back(folder: Path, expected: list[int]) -> None:
    with worker(folder) as w:
        output = w.run({1: replace(JOB, stop_seqs=(packed([*expected, VOCAB - 1]),))})[1]
        assert output.rows == [{"finish": "length", "generated": 20}]
        assert output.ids == expected


def test_paused_and_idle_it_sleeps(folder: Path, expected: list[int]) -> None:
    with worker(folder, max_context=LONG) as w:
        w.assign(1, ENDLESS)
        w.until(lambda: len(w.outputs[1].ids) > 3)
        w.send([ipc.PAUSE, 1], [ipc.PAUSE, 1], [ipc.PAUSE, 99])
        while w.read(0.2):
            pass
        beat, steps = w.page[Field.BEAT_NS], w.page[Field.STEPS]
        assert (w.page[Field.BUSY], w.page[Field.KEYS]) == (0, 0)
        assert not w.read(0.2)
        assert (w.page[Field.BEAT_NS], w.page[Field.STEPS]) == (beat, steps)
        assert w.run({2: JOB})[2].ids == expected  # the paused one is in nobody's way
        w.send([ipc.RESUME, 1], [ipc.RESUME, 99])
        w.until(lambda: len(w.outputs[1].ids) > 30)
        assert w.outputs[1].ids[:20] == expected
        w.send([ipc.PAUSE, 1], [ipc.CANCEL, 1, "abort"])
        w.until(lambda: 1 in w.ended)
        w.pool.until(lambda: w.pool.idle)


def test_it_waits_for_a_dispatcher_that_does_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "FULL_BYTES", 8192)
    with worker(folder) as w:
        w.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for key in range(1, 33):
            w.assign(key, Job(packed(PROMPT), 400, logprobs=20))
        eventually(lambda: w.page[Field.STEPS] > 0 and w.page[Field.BUSY] == 0)
        steps = w.page[Field.STEPS]
        assert steps < 400
        w.send([ipc.CANCEL, 1, "abort"])  # is still heard
        w.until(lambda: len(w.ended) == 32)
        assert w.page[Field.STEPS] > steps
        assert sorted(len(output.ids) for output in w.outputs.values())[1:] == [400] * 31


# ---- what it shows ---------------------------------------------------------------------------------------------------


def test_the_page_tells_what_runs(folder: Path) -> None:
    with worker(folder, max_context=LONG) as w:
        assert (w.page[Field.KEYS], w.page[Field.STEPS]) == (0, 0)
        w.assign(1 << 40, ENDLESS)
        w.assign(7, ENDLESS)
        eventually(lambda: list(w.page.memory.cast("Q")[Field.KEYS : Field.KEYS + 3]) == [1 << 40, 7, 0], w)
        eventually(lambda: w.page[Field.BUSY] == 2, w)
        w.send([ipc.CANCEL, 1 << 40, "abort"])
        eventually(lambda: list(w.page.memory.cast("Q")[Field.KEYS : Field.KEYS + 2]) == [7, 0], w)
        w.send([ipc.CANCEL, 7, "abort"])
        w.until(lambda: len(w.ended) == 2)
        eventually(lambda: w.page[Field.BUSY] == 0)
        assert w.page[Field.KEYS] == 0
        assert w.page[Field.PROGRESS] > w.page[Field.STEPS] > 0
        w.pool.until(lambda: w.pool.idle)


def test_every_step_is_told_in_order(folder: Path) -> None:
    with worker(folder, step_tokens=8) as w:
        jobs = Job(packed(PROMPT * 4), 5), Job(packed(PROMPT * 9), 2), Job(packed(PROMPT))
        w.run({key: replace(job, cache=False) for key, job in enumerate(jobs, 1)})
        numbers = [number for number, _, _ in w.steps]
        assert numbers == sorted(numbers)
        assert numbers[-1] == w.page[Field.STEPS]  # short steps share a message
        assert sum(info["rows"] for _, _, info in w.steps) == 28 + 4 + 63 + 1  # every token but the last, once


# ---- the pool --------------------------------------------------------------------------------------------------------


def test_requests_wait_for_a_pool_and_can_leave_meanwhile(folder: Path, expected: list[int]) -> None:
    with worker(folder, pool=False) as w:
        w.send(*([ipc.ASSIGN, key, JOB.to_wire()] for key in (1, 2, 3, 4)), [ipc.PAUSE, 4])
        w.send([ipc.CANCEL, 1, "abort"])
        w.until(lambda: w.ended == {1})
        w.assign(1, JOB)  # as another dispatcher might
        w.ended.clear()
        w.connect_pool()
        w.until(lambda: w.ended == {1, 2, 3})
        assert all(w.outputs[key].ids == expected for key in (1, 2, 3))
        eventually(lambda: w.page[Field.BUSY] == 0)
        w.send([ipc.RESUME, 4])
        w.until(lambda: 4 in w.ended)
        assert w.outputs[4].ids == expected
        w.pool.until(lambda: w.pool.idle)


def test_it_goes_on_from_its_free_list_without_a_pool(folder: Path, expected: list[int]) -> None:
    with worker(folder) as w:
        w.assign(1, replace(JOB, max_tokens=9))  # of one slab
        w.until(lambda: bool(w.outputs[1].ids))
        w.pool.stop()
        w.until(lambda: 1 in w.ended)
        assert w.outputs[1].ids == expected[:9]
        w.assign(2, JOB)
        w.pool.start([(0, 1)])
        w.connect_pool()
        w.until(lambda: 2 in w.ended)
        assert w.outputs[2].ids == expected
        w.pool.until(lambda: w.pool.idle)


@pytest.mark.parametrize("seconds", [0.0, server.SUSPECT_SECONDS])
def test_damage_by_a_worker_that_dies_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Of what has a CRC, of what is still being written, and of what was committed just before and is not believed. The
    requests are paused while it happens."""
    monkeypatch.setattr(server, "SUSPECT_SECONDS", seconds)
    prompts = {1: PROMPT, 2: PROMPT * 300}  # the first never fills a slab
    with Engine.open(folder) as engine:
        right = {key: engine.generate(prompt, 1500) for key, prompt in prompts.items()}
    with worker(folder, slab_tokens=2048, slabs=16) as w:
        for key, prompt in prompts.items():
            w.assign(key, Job(packed(prompt), max_tokens=1500))
        w.until(lambda: all(w.outputs[key].ids for key in prompts))
        w.send([ipc.PAUSE, 1], [ipc.PAUSE, 2])
        eventually(lambda: w.page[Field.BUSY] == 0, w)
        w.pool.until(lambda: w.pool.pool.counts()["committed"] == 1)
        with w.pool.arena.map() as memory:
            memory[:] = b"\x5a" * len(memory)
        w.pool.bury(1, 1, fault=True)
        w.pool.until(lambda: w.pool.pool.counts()["committed"] == 0)  # the worker has let it go
        w.pool.until(lambda: w.pool.pool.counters.get("kv_quarantined_total") == (not seconds))
        w.send([ipc.RESUME, 1], [ipc.RESUME, 2])
        w.until(lambda: w.ended == prompts.keys())
        assert {key: w.outputs[key].ids for key in prompts} == right
        w.pool.until(lambda: w.pool.idle)


def test_nobody_waits_for_one_that_is_paused(folder: Path) -> None:
    """It was told to compute a text, and a pool tells others to wait for that."""
    job = Job(packed(PROMPT * 20), max_tokens=20)
    with Engine.open(folder) as engine:
        right = engine.generate(PROMPT * 20, 20)
    with worker(folder) as w:
        w.send([ipc.ASSIGN, 1, job.to_wire()], [ipc.PAUSE, 1], [ipc.ASSIGN, 2, job.to_wire()])
        w.until(lambda: 2 in w.ended)
        assert w.outputs[2].ids == right
        assert 1 not in w.ended
        w.send([ipc.RESUME, 1])
        w.until(lambda: 1 in w.ended)
        assert w.outputs[1].ids == right


def test_preempted_it_tells_nothing_of_what_is_held_back(folder: Path, expected: list[int]) -> None:
    held = packed([*expected, VOCAB - 1])
    with worker(folder) as w:
        w.assign(1, replace(JOB, stop_seqs=(held,)))
        eventually(lambda: w.page[Field.STEPS] > 5, w)
        w.preempt(1)
        w.until(lambda: 1 in w.ended)
        assert [row.get("finish") for row in w.outputs[1].rows] in (["preempted", "length"], ["length"])
        assert w.outputs[1].ids == expected
        assert w.outputs[1].rows[0].get("generated", 0) > 0


@pytest.mark.parametrize("has_crc", [True, False])
def test_nan_out_of_damage_is_computed_again(folder: Path, has_crc: bool) -> None:
    """Nobody has heard of a death by a fault. What differs from its CRC is thrown away; where the damage is older than
    the CRC, nothing of the cache is used."""
    prompt = PROMPT * 40
    with Engine.open(folder) as engine:
        right = engine.generate(prompt, 20)
    with worker(folder) as w:
        w.run({1: Job(packed(prompt), max_tokens=1)})
        w.pool.until(lambda: w.pool.idle)
        size, slabs = w.pool.arena.slab_bytes, [s for s in w.pool.pool.ledger.table.all if s.node is not None]
        with w.pool.arena.map() as memory:
            for slab in slabs[:2]:
                memory[slab.number * size : (slab.number + 1) * size] = b"\xff" * size
                slab.crc = slab.crc if has_crc else crc32c.crc32c(b"\xff" * size)
        assert w.run({2: Job(packed(prompt), max_tokens=20)})[2].ids == right
        assert w.pool.pool.counts()["quarantined"] == (2 if has_crc else 0)


@pytest.mark.parametrize("length", [64, 128, 129])
def test_what_the_last_step_computed_is_cached_too(folder: Path, length: int) -> None:
    """A request that ends in the step which computes its prompt leaves the prompt behind."""
    prompt = packed([1 + i % 50 for i in range(length)])
    with worker(folder) as w:
        w.run({1: Job(prompt, max_tokens=1)})
        w.pool.until(lambda: w.pool.idle)
        again = w.run({2: Job(prompt + packed([3]), max_tokens=1)})[2]
        assert again.rows[0]["cached"] == length // w.pool.arena.slab_tokens * w.pool.arena.slab_tokens
