"""The tokens of a request do not depend on its neighbours: random requests through a worker's loop, joining, leaving,
pausing and being preempted, give what the Engine gives for each alone, token for token and float for float."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
from colibri_daemon.common import ipc
from colibri_daemon.common.job import Job
from colibri_engine import Engine
from colibri_engine.binding import Sample, Sampling, token_array
from colibri_engine.sequence import Sequence
from fixtures.models import Models
from fixtures.worker import SECONDS, Dispatcher, Output, worker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference.stops import Rules, ending

SLAB = 16
EXAMPLES, MANY_EXAMPLES = 6, int(os.environ.get("COLIBRI_EXAMPLES", 100))  # the latter under `-m full`
BEHAVIOUR = settings(deadline=None, suppress_health_check=list(HealthCheck))


def packed(ids: Any) -> bytes:
    return np.asarray(ids, "<u4").tobytes()


def ids_of(packed: bytes) -> list[int]:
    return np.frombuffer(packed, "<u4").tolist()


# ---- what each request must give -------------------------------------------------------------------------------------


def sampling(job: Job) -> dict[str, Any]:
    return {f.name: getattr(job, f.name) for f in fields(Sampling) if f.name != "allowed"}


def rules(job: Job) -> Rules:
    return Rules(job.max_tokens, job.min_tokens, tuple(ids_of(job.eos_ids)), tuple(ids_of(job.stop_ids)),
                 tuple(tuple(ids_of(s)) for s in job.stop_seqs))  # fmt: skip


def stream(engine: Engine, job: Job) -> Iterator[Sample]:
    """All tokens without any stop."""
    mask = {"pinned": job.pinned, "window": job.window, "positions": job.positions}
    prompt, barred = ids_of(job.tokens), {*ids_of(job.eos_ids), *ids_of(job.stop_ids)}
    if not (job.min_tokens and barred):
        yield from engine.stream(prompt, job.max_tokens, **mask, **sampling(job))
        return
    sequence = Sequence(engine.attention(**mask), engine.info.slab_tokens)
    arena, generated, fresh = engine.arena(99), list[int](), token_array(prompt)
    how = Sampling(**sampling(job))
    first = replace(how, allowed=frozenset(range(engine.info.vocab)) - barred)
    for count in range(job.max_tokens):
        logits = engine.step([(sequence, fresh, len(fresh) - 1)], arena)[0][-1]
        now = first if count < job.min_tokens else how
        drawn = engine.sample(logits, now, len(prompt) + count, token_array(prompt), token_array(generated))
        generated.append(drawn.token)
        fresh = token_array([drawn.token])
        yield drawn


@dataclass
class Expected:
    """samples: those that are sent. generated counts the withheld too."""

    samples: list[Sample] = field(default_factory=list)
    finish: str = "length"
    match: tuple[str, int] | None = None
    generated: int = 0
    everything: list[int] = field(default_factory=list)  # as if nothing stopped

    @property
    def ids(self) -> list[int]:
        return [sample.token for sample in self.samples]


def expected(engine: Engine, job: Job) -> Expected:
    samples = list(stream(engine, job))
    everything = [sample.token for sample in samples]
    for n in range(1, len(samples) + 1):
        finish, match, sent = ending(rules(job), everything[:n])
        if finish:
            return Expected(samples[:sent], finish, match, n, everything)
    return Expected()


def check(engine: Engine, job: Job, output: Output, wanted: Expected) -> None:
    """An output that was not interfered with."""
    kept = len(job.generated) // 4
    assert output.ids == wanted.ids[kept:]
    assert output.finish is not None
    match = output.finish.get("match")
    assert (output.finish["finish"], match and tuple(match)) == (wanted.finish, wanted.match)
    assert output.finish["generated"] == wanted.generated
    check_log_probabilities(job, output, wanted.samples[kept:])
    if job.prompt_logprobs is not None or job.score_from is not None:
        check_scores(engine, job, output)
    else:
        assert not output.scores()[0]


def check_log_probabilities(job: Job, output: Output, samples: list[Sample]) -> None:
    if job.logprobs is None:
        assert not any(row.keys() & {"lp", "top", "toplp"} for row in output.rows)
        return
    assert output.floats("lp") == [sample.logprob for sample in samples]
    assert output.floats("toplp") == [value for sample in samples for _, value in sample.top]
    tops = ids_of(b"".join(row.get("top", b"") for row in output.rows))
    assert tops == [id for sample in samples for id, _ in sample.top]


def check_scores(engine: Engine, job: Job, output: Output) -> None:
    tokens, first = ids_of(job.tokens), job.score_from or 1
    rows = engine.logits(tokens, job.pinned, job.window, job.positions)
    samples = [engine.score(rows[i - 1], tokens[i], job.prompt_logprobs or 0) for i in range(first, len(tokens))]
    values, tops, top_values = output.scores()
    assert values == [sample.logprob for sample in samples]
    assert tops == [id for sample in samples for id, _ in sample.top]
    assert top_values == [value for sample in samples for _, value in sample.top]


# ---- random requests -------------------------------------------------------------------------------------------------


def random_job(rng: np.random.Generator, vocab: int, likely: list[int]) -> Job:
    """likely: tokens the model says often, for stops that happen."""

    def some(low: int, high: int) -> bytes:
        return packed(rng.choice(likely, rng.integers(low, high)))

    def maybe(share: float, value: Any, default: Any) -> Any:
        return value if rng.random() < share else default

    tokens = packed(rng.integers(0, vocab, rng.integers(1, 70)))
    windows = [(0, 0), (0, 17), (5, 40), (16, 32)]
    pinned, window = windows[rng.integers(len(windows))]
    mask = {"pinned": pinned, "window": window, "positions": str(rng.choice(["cache", "absolute"]))}
    if rng.random() < 0.1:
        top = int(rng.integers(0, 4))
        return Job(tokens, score_from=int(rng.integers(1, len(tokens) // 4 + 1)), prompt_logprobs=top, **mask)
    seeded = {"temperature": float(rng.uniform(0.2, 1.5)), "seed": int(rng.integers(1 << 63)),
              "top_k": maybe(0.3, int(rng.integers(1, 50)), 0), "top_p": maybe(0.3, 0.9, 1.0),
              "min_p": maybe(0.3, 0.05, 0.0)}  # fmt: skip
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    return Job(
        tokens, max_tokens=int(rng.integers(0, 40)), min_tokens=maybe(0.3, int(rng.integers(0, 12)), 0),
        logit_bias={int(t): 1.5 for t in rng.integers(0, vocab, maybe(0.3, 3, 0))},
        eos_ids=maybe(0.5, some(1, 2), b""), stop_ids=maybe(0.3, some(1, 3), b""),
        stop_seqs=maybe(0.4, tuple(some(1, 4) for _ in range(3)), ()),
        logprobs=maybe(0.3, int(rng.integers(0, 4)), None), prompt_logprobs=maybe(0.2, int(rng.integers(0, 3)), None),
        **maybe(0.6, seeded, {}), **maybe(0.3, penalties, {}), **mask,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["f32", "q4"])
def engine(request: pytest.FixtureRequest, models: Models) -> Iterator[Engine]:
    """The tiny model by itself: what every request is compared with."""
    with Engine.open(models.tiny(request.param), slab_tokens=SLAB) as opened:
        yield opened


def random_jobs(engine: Engine, rng: np.random.Generator, count: int) -> dict[int, Job]:
    likely = engine.generate(range(20), 30, temperature=1.0, seed=1)
    return {key: random_job(rng, engine.info.vocab, likely) for key in range(1, count + 1)}


class Crowd:
    """Requests that come and go: each joins after some steps, and something may happen to it after some tokens."""

    def __init__(self, dispatcher: Dispatcher, jobs: Mapping[int, Job], rng: np.random.Generator) -> None:
        self._dispatcher, self._jobs, self._rng = dispatcher, jobs, rng
        self._joins = {key: int(rng.integers(0, 30)) for key in jobs}
        self._acts = {key: (int(rng.integers(0, 12)), str(rng.choice(["cancel", "deadline", "pause", "", "", "", ""])))
                      for key in jobs}  # fmt: skip
        self._paused: dict[int, int] = {}  # key -> step number to resume at
        self.cancelled: dict[int, str] = {}

    def run(self) -> None:
        turn, deadline = 0, time.monotonic() + SECONDS
        while len(self._dispatcher.ended) < len(self._jobs):
            self._join(turn)
            self._act(turn)
            turn += 1
            assert time.monotonic() < deadline
            self._dispatcher.read(0.05)  # nothing comes while all who are there are paused

    def _join(self, turn: int) -> None:
        due = [key for key, at in self._joins.items() if at <= turn]
        self._dispatcher.send(*([ipc.ASSIGN, key, self._jobs[key].to_wire()] for key in due))
        for key in due:
            del self._joins[key]

    def _act(self, turn: int) -> None:
        for key, (tokens, act) in list(self._acts.items()):
            if act and key not in self._joins and len(self._dispatcher.outputs[key].ids) >= tokens:
                del self._acts[key]
                self._do(key, act, turn)
        for key in [key for key, at in self._paused.items() if at <= turn]:
            del self._paused[key]
            self._dispatcher.send([ipc.RESUME, key])

    def _do(self, key: int, act: str, turn: int) -> None:
        if act == "pause":
            self._paused[key] = turn + int(self._rng.integers(1, 20))
            self._dispatcher.send([ipc.PAUSE, key])
        else:
            self.cancelled[key] = finish = "abort" if act == "cancel" else act
            self._dispatcher.cancel(key, finish)


def check_cancelled(output: Output, wanted: Expected, finish: str) -> None:
    """As far as it went, all of it: also what was held back."""
    assert output.finish is not None
    assert output.finish["finish"] == finish
    assert output.finish["generated"] == len(output.ids)
    assert output.ids == wanted.everything[: len(output.ids)]


def crowded(engine: Engine, seed: int, count: int, step_tokens: int, slabs: int) -> None:
    rng = np.random.default_rng(seed)
    jobs = random_jobs(engine, rng, count)
    with worker(engine.path, step_tokens=step_tokens, max_seqs=12, slabs=slabs, slab_tokens=SLAB) as dispatcher:
        crowd = Crowd(dispatcher, jobs, rng)
        crowd.run()
        dispatcher.pool.until(lambda: dispatcher.pool.idle)
    for key, job in jobs.items():
        output, wanted = dispatcher.outputs[key], expected(engine, job)
        finish = output.finish["finish"] if output.finish else None
        if key in crowd.cancelled and finish == crowd.cancelled[key]:
            check_cancelled(output, wanted, finish)
        else:
            check(engine, job, output, wanted)


CROWDS = given(seed=st.integers(0, 2**32), count=st.integers(1, 32), step_tokens=st.integers(8, 80),
               slabs=st.sampled_from([9, 20, 400]))  # fmt: skip


@settings(BEHAVIOUR, max_examples=EXAMPLES)
@CROWDS
def test_neighbours_make_no_difference(engine: Engine, seed: int, count: int, step_tokens: int, slabs: int) -> None:
    """With few slabs they preempt one another all the time."""
    crowded(engine, seed, count, step_tokens, slabs)


@pytest.mark.full
@settings(BEHAVIOUR, max_examples=MANY_EXAMPLES)
@CROWDS
def test_neighbours_make_no_difference_at_length(engine: Engine, seed: int, count: int, step_tokens: int,
                                                 slabs: int) -> None:
    crowded(engine, seed, count, step_tokens, slabs)


@settings(BEHAVIOUR, max_examples=3)
@given(seed=st.integers(0, 2**32))
def test_a_stream_goes_on_from_any_token(engine: Engine, seed: int) -> None:
    """Resumed at every index, all at once, in another worker."""
    rng = np.random.default_rng(seed)
    jobs = {key: job for key, job in random_jobs(engine, rng, 12).items() if job.score_from is None}
    wanted = {key: expected(engine, job) for key, job in jobs.items()}
    parts = {
        100 * key + kept: replace(job, generated=packed(wanted[key].ids[:kept]))
        for key, job in jobs.items() for kept in range(len(wanted[key].ids) + 1)
    }  # fmt: skip
    with worker(engine.path, step_tokens=48, slab_tokens=SLAB) as dispatcher:
        outputs = dispatcher.run(parts)
    for part, output in outputs.items():
        check(engine, parts[part], output, wanted[part // 100])


def test_alone_or_with_thirty_one_others(engine: Engine) -> None:
    """One request at a time, then all of them at once."""
    jobs = random_jobs(engine, np.random.default_rng(8), 32)
    with worker(engine.path, step_tokens=32, slab_tokens=SLAB) as dispatcher:
        alone = {key: dispatcher.run({key: job})[key] for key, job in jobs.items()}
    with worker(engine.path, step_tokens=64, slab_tokens=SLAB) as dispatcher:
        together = dispatcher.run(jobs)
        assert max(rows for _, rows, _ in dispatcher.steps) > 16
    for key, job in jobs.items():
        wanted = expected(engine, job)
        for output in (alone[key], together[key]):
            check(engine, job, output, wanted)
