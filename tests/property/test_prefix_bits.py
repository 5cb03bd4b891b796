"""A prefix from the cache gives the same bits as one that is computed: tokens, log probabilities and alternatives of
requests that hit, against Engine.stream(), whatever the slab, and after all that may happen to a request's slabs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from colibri_daemon.common import ipc
from colibri_daemon.common.job import Job
from colibri_daemon.kvpool import server
from colibri_daemon.kvpool.slabs import State
from colibri_engine import Engine
from fixtures.models import Models
from fixtures.worker import Dispatcher, Output, worker
from test_batching import check, expected

P, W = 128, 384  # the model was trained for P + W
SLABS = [16, 32, 64]
SHORT_HITS, LONG_HITS = (-1, 0, 1), (511, 512, 513, P + W + 1, P + W + 2, 2 * (P + W))  # the former around one slab
HOW = Job(b"", max_tokens=20, temperature=0.9, seed=3, logprobs=3, pinned=P, window=W)


@pytest.fixture(scope="module", params=["f32", "q4"])
def engine(request: pytest.FixtureRequest, models: Models) -> Iterator[Engine]:
    with Engine.open(models.tiny(request.param)) as opened:
        yield opened


def text(engine: Engine, seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, engine.info.vocab, length, dtype=np.uint32)


def job(*parts: np.ndarray, **fields: object) -> Job:
    return replace(HOW, tokens=np.concatenate(parts).tobytes(), **fields)


def cached(output: Output) -> int:
    told = [row["cached"] for row in output.rows if "cached" in row]
    assert len(told) <= 1
    return told[0] if told else 0


def run(engine: Engine, w: Dispatcher, key: int, wanted: Job) -> int:
    """Runs it alone, compares all of it; tokens that came from the cache."""
    output = w.run({key: wanted})[key]
    check(engine, wanted, output, expected(engine, wanted))
    w.pool.until(lambda: w.pool.idle)
    return cached(output)


# ---- hits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SLABS)
def test_a_hit_of_any_length_is_as_good_as_cold(engine: Engine, size: int) -> None:
    with worker(engine.path, slab_tokens=size, step_tokens=100) as w:
        for key, length in enumerate([*(size + more for more in SHORT_HITS), *LONG_HITS], 1):
            prefix = text(engine, key, length)
            assert run(engine, w, 2 * key, job(prefix, text(engine, 100, 3))) == 0
            found = run(engine, w, 2 * key + 1, job(prefix, text(engine, 101, 70)))
            assert found == length // size * size


@pytest.mark.parametrize("positions", ["cache", "absolute"])
@pytest.mark.parametrize(("pinned", "window"), [(0, 0), (0, 100), (5, 40), (64, 64)])
def test_whatever_a_query_sees(engine: Engine, pinned: int, window: int, positions: str) -> None:
    mask = {"pinned": pinned, "window": window, "positions": positions}
    prefix = text(engine, 1, 300)
    with worker(engine.path, slab_tokens=16, step_tokens=64) as w:
        run(engine, w, 1, job(prefix, **mask))
        assert run(engine, w, 2, job(prefix, text(engine, 2, 9), **mask)) == 288


def test_a_second_turn_finds_the_first_ones_answer(engine: Engine) -> None:
    prompt = text(engine, 1, 30)
    with worker(engine.path, slab_tokens=16) as w:
        first = w.run({1: job(prompt, max_tokens=50)})[1].ids
        assert run(engine, w, 2, job(prompt, np.array(first, np.uint32), text(engine, 2, 9))) == 64


def test_the_whole_prompt_again_computes_at_least_one_token(engine: Engine) -> None:
    with worker(engine.path, slab_tokens=16) as w:
        assert [run(engine, w, key, job(text(engine, 1, 64))) for key in (1, 2)] == [0, 48]


def test_many_at_once_compute_a_prefix_once(engine: Engine) -> None:
    prefix = text(engine, 1, 600)
    jobs = {key: job(prefix, text(engine, key, 5)) for key in range(1, 17)}
    with worker(engine.path, slab_tokens=16, step_tokens=64) as w:
        outputs = w.run(jobs)
        assert sum(info["rows"] for _, _, info in w.steps) < 600 + 16 * (600 % 16 + 5 + HOW.max_tokens)
    for key, wanted in jobs.items():
        check(engine, wanted, outputs[key], expected(engine, wanted))
    assert sorted(map(cached, outputs.values())) == [0] + [592] * 15


@pytest.mark.parametrize("step_tokens", [64, 100])
def test_many_at_once_copy_what_fills_no_slab(engine: Engine, step_tokens: int) -> None:
    """Wherever in the slab the first one's chunks end: the others wait for it, and compute their own ends only."""
    prefix = text(engine, 1, 6 * 64 + 40)
    jobs = {key: job(prefix, text(engine, key, 5)) for key in range(1, 17)}
    with worker(engine.path, slab_tokens=64, step_tokens=step_tokens) as w:
        outputs = w.run(jobs)
        assert sum(info["rows"] for _, _, info in w.steps) == len(prefix) + 16 * (5 + HOW.max_tokens - 1)
    for key, wanted in jobs.items():
        check(engine, wanted, outputs[key], expected(engine, wanted))
    assert sorted(map(cached, outputs.values())) == [0] + [len(prefix)] * 15


@pytest.mark.parametrize("leave", ["cancel", "preempt", "pause"])
def test_who_others_wait_for_may_leave(engine: Engine, leave: str) -> None:
    """In the middle of a slab that they wait for."""
    prefix = text(engine, 1, 60)
    jobs = {key: job(prefix, text(engine, key, 5)) for key in (1, 2, 3)}
    with worker(engine.path, slab_tokens=64, step_tokens=8) as w:
        for key, wanted in jobs.items():
            w.assign(key, wanted)
        w.until(lambda: bool(w.steps))
        if leave == "cancel":
            w.cancel(1, "cancelled")
        elif leave == "preempt":
            w.preempt(1)
        else:
            w.send([ipc.PAUSE, 1])
        w.until(lambda: {2, 3} <= w.ended)
        for key in (2, 3):
            check(engine, jobs[key], w.outputs[key], expected(engine, jobs[key]))


# ---- what must not be taken ------------------------------------------------------------------------------------------


def test_scores_are_computed_from_the_first_one_on(engine: Engine) -> None:
    prefix = text(engine, 1, 200)
    with worker(engine.path, slab_tokens=16) as w:
        run(engine, w, 1, job(prefix))
        assert run(engine, w, 2, job(prefix, prompt_logprobs=2)) == 0
        for key, first in enumerate((16, 17, 97, 98, 199), 3):
            score = replace(HOW, tokens=prefix.tobytes(), max_tokens=0, logprobs=None, score_from=first)
            assert run(engine, w, key, score) == (first - 1) // 16 * 16


def test_others_and_those_that_do_not_want_it_get_nothing(engine: Engine) -> None:
    prompt = text(engine, 1, 100)
    with worker(engine.path, slab_tokens=16) as w:
        assert run(engine, w, 1, job(prompt, cache=False)) == 0
        assert run(engine, w, 2, job(prompt, salt=b"a")) == 0
        assert run(engine, w, 3, job(prompt, salt=b"b")) == 0
        assert run(engine, w, 4, job(prompt, cache=False, salt=b"a")) == 0
        assert run(engine, w, 5, job(prompt, salt=b"a")) == 96


# ---- what may happen to a request ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SLABS)
def test_preempted_it_goes_on_with_the_same_bits(engine: Engine, size: int) -> None:
    """Wherever it is, many times, in the prompt and in the output."""
    wanted = job(text(engine, 1, 700), max_tokens=60)
    with worker(engine.path, slab_tokens=size, step_tokens=100) as w:
        w.assign(1, wanted)
        for count in range(0, 50, 7):
            w.until(lambda count=count: len(w.outputs[1].ids) >= count or 1 in w.ended)
            w.preempt(1)
        w.until(lambda: 1 in w.ended)
        check(engine, wanted, w.outputs[1], expected(engine, wanted))
        w.pool.until(lambda: w.pool.idle)


def scribble(w: Dispatcher, slabs: list[int]) -> None:
    size = w.pool.arena.slab_bytes
    with w.pool.arena.map() as memory:
        for slab in slabs:
            memory[slab * size + 100 : slab * size + 200] = bytes(range(100))


@pytest.mark.parametrize("size", SLABS)
def test_what_a_dead_worker_has_written_over_is_not_used(engine: Engine, size: int,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SUSPECT_SECONDS", 0.0)  # all of it was committed before
    prefix = text(engine, 1, 400)
    with worker(engine.path, slab_tokens=size) as w:
        run(engine, w, 1, job(prefix, max_tokens=1))
        slabs = w.pool.pool.ledger.table.all
        scribble(w, [slab.number for slab in slabs if slab.state is State.CACHED and slab.ordinal == 2])
        w.pool.bury(1, 1, fault=True)
        assert run(engine, w, 2, job(prefix)) == 2 * size
        assert run(engine, w, 3, job(prefix)) == 399 // size * size
        assert w.pool.pool.counts()["quarantined"] == 1


@pytest.mark.parametrize("neighbours", [0, 3])
def test_a_running_request_whose_slabs_are_damaged_is_computed_again(engine: Engine, neighbours: int,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is paused, so that no token can be made of them before anybody knows."""
    monkeypatch.setattr(server, "SUSPECT_SECONDS", 0.0)
    prefix = text(engine, 1, 600)
    jobs = {key: job(prefix, text(engine, key, 3), max_tokens=60) for key in range(1, 2 + neighbours)}
    with worker(engine.path, slab_tokens=16) as w:
        w.send(*([ipc.ASSIGN, key, each.to_wire()] for key, each in jobs.items()))
        w.until(lambda: all(len(w.outputs[key].ids) > 20 for key in jobs))
        w.send(*([ipc.PAUSE, key] for key in jobs))
        while w.read(0.2):
            pass
        committed = [slab.number for slab in w.pool.pool.ledger.table.all if slab.state is State.COMMITTED]
        scribble(w, committed[5:30:6])
        w.pool.bury(1, 1, fault=True)
        w.pool.until(lambda: w.pool.pool.counts()["quarantined"] == len(committed[5:30:6]))
        w.send(*([ipc.RESUME, key] for key in jobs))
        w.until(lambda: jobs.keys() <= w.ended)
        for key, wanted in jobs.items():
            check(engine, wanted, w.outputs[key], expected(engine, wanted))
        w.pool.until(lambda: w.pool.idle)


def test_the_pool_may_die_at_any_time(engine: Engine) -> None:
    """Requests that run, wait for one another and are assigned meanwhile go on; what was cached is found again."""
    prefix = text(engine, 1, 500)
    jobs = {key: job(prefix[: 100 * (key % 6)], text(engine, key, 20), max_tokens=150) for key in range(1, 13)}
    with worker(engine.path, slab_tokens=16, step_tokens=48) as w:
        for key, each in jobs.items():
            w.assign(key, each)
            w.read(0.01)
            w.restart_pool()
        for count in range(10, 150, 10):
            w.until(lambda count=count: len(w.outputs[1].ids) >= count)
            w.restart_pool()
        w.until(lambda: jobs.keys() <= w.ended)
        for key, wanted in jobs.items():
            check(engine, wanted, w.outputs[key], expected(engine, wanted))
        w.pool.until(lambda: w.pool.idle)
        assert run(engine, w, 99, job(prefix, max_tokens=1)) == 496
