"""The scheduler: who gets rows, how many, and that everybody ends."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import pytest
from colibri_daemon.worker.scheduler import AHEAD, CROWD, LEAST_CHUNK, Plan, Scheduler
from hypothesis import given
from hypothesis import strategies as st

SLAB = 4
ARRIVALS = count(1)


@dataclass(eq=False)
class Line:
    """A text: prompt, then ``more`` tokens, each known once the one before is computed."""

    prompt: int
    more: int = 1
    scored_from: int = 0
    scored_to: int = 0
    position: int = 0
    n_slabs: int = 0
    sees: int = 1000

    def __post_init__(self) -> None:
        self.target = self.prompt

    @property
    def most(self) -> int:
        return self.prompt + self.more - 1

    def advance(self, rows: int) -> bool:
        """Takes a step's rows. True at the end of the text."""
        self.position += rows
        assert self.position <= self.target
        if self.position == self.target:
            self.target += 1
        return self.target == self.prompt + self.more


class Slabs:
    """Carries plans out, as the worker's loop does, and checks them."""

    def __init__(self, scheduler: Scheduler[Line], total: int) -> None:
        self.scheduler, self.total, self.free = scheduler, total, total

    def step(self) -> tuple[Plan[Line], list[Line]]:
        """(the plan, those that have ended)."""
        running = list(self.scheduler.running)
        plan = self.scheduler.plan(self.free)
        ended = []
        for line, rows in plan.work:
            assert line in running
            need = max(0, -(-(line.position + rows) // SLAB) - line.n_slabs)
            self.free -= need
            assert self.free >= 0
            line.n_slabs += need
            if line.advance(rows):
                ended.append(line)
        for line in ended:
            self.scheduler.finish(line)
            self.free += line.n_slabs
        return plan, ended


def scheduler(max_seqs: int = 8, step_tokens: int = 16, scored_rows: int = 4, key_cost: float = 0.0) -> Scheduler[Line]:
    return Scheduler(max_seqs, step_tokens, scored_rows, SLAB, key_cost)


def admitted(s: Scheduler[Line], *lines: Line) -> list[Line]:
    for line in lines:
        s.admit(line, next(ARRIVALS))
    return list(lines)


def test_decode_rows_come_first_and_prefill_by_arrival_fills_the_rest() -> None:
    s = scheduler()
    a, b, c = admitted(s, Line(20, 9), Line(3, 9), Line(30, 9))
    run = Slabs(s, 100)
    assert run.step()[0].work == [(a, 16)]
    assert run.step()[0].work == [(a, 4), (b, 3), (c, 9)]
    assert run.step()[0].work == [(a, 1), (b, 1), (c, 14)]
    d = admitted(s, Line(2, 9))[0]
    assert run.step()[0].work == [(a, 1), (b, 1), (c, 7), (d, 2)]


def test_owners_share_the_budget_and_who_comes_is_first() -> None:
    s = scheduler()
    run = Slabs(s, 1000)
    long, longer = Line(80, 9), Line(200, 9)
    for line in (long, longer):
        s.admit(line, next(ARRIVALS), owner=1)
    assert run.step()[0].work == [(long, 16)]
    other = Line(40, 9)
    s.admit(other, next(ARRIVALS), owner=2)
    assert [run.step()[0].work for _ in range(4)] == [[(other, 16)], [(long, 16)]] * 2
    assert run.step()[0].work == [(other, 8), (long, 8)]
    assert run.step()[0].work == [(other, 1), (long, 15)]


def test_nobody_saves_up_a_share_of_the_budget() -> None:
    s = scheduler()
    run = Slabs(s, 1000)
    first, second = Line(1000, 9), Line(10, 9)
    s.admit(first, next(ARRIVALS), owner=1)
    for _ in range(10):
        run.step()
    s.admit(second, next(ARRIVALS), owner=2)
    assert run.step()[0].work == [(second, 10), (first, 6)]
    third = Line(100, 9)
    s.admit(third, next(ARRIVALS), owner=3)
    firsts = [run.step()[0].work[1][0] for _ in range(6)]
    assert firsts == [third, first] * 3


def test_prefill_goes_on_however_many_decode() -> None:
    s = scheduler(max_seqs=20, step_tokens=16)
    decoding = admitted(s, *(Line(1, 50) for _ in range(15)))
    run = Slabs(s, 1000)
    late = admitted(s, Line(40, 2))[0]
    assert run.step()[0].work == [*((line, 1) for line in decoding), (late, LEAST_CHUNK)]


def test_chunks_are_shorter_while_streams_go_on() -> None:
    s = Scheduler[Line](8, 64, 4, SLAB, gentle=12)
    (stream,) = admitted(s, Line(1, 50))
    run = Slabs(s, 1000)
    (late,) = admitted(s, Line(200, 2))
    assert run.step()[0].work == [(stream, 1), (late, 12)]
    s.finish(stream)
    assert run.step()[0].work == [(late, 64)]


def test_many_who_wait_weigh_more_than_the_streams() -> None:
    s = Scheduler[Line](40, 64, 4, SLAB, gentle=12)
    (stream,) = admitted(s, Line(1, 50))
    first, *_ = admitted(s, *(Line(200, 2) for _ in range(2 * CROWD - 1)))
    assert s.plan(1000).work == [(stream, 1), (first, 12)]
    admitted(s, Line(200, 2))
    assert s.plan(1000).work == [(stream, 1), (first, 24)]


def test_rows_deep_in_a_text_count_more() -> None:
    s = scheduler(step_tokens=40, key_cost=0.1)
    shallow, deep = Line(200), Line(200, sees=30)
    deep.position = 100
    deep.n_slabs = 25
    admitted(s, shallow)
    assert s.plan(1000).work == [(shallow, 40)]
    s.finish(shallow)
    admitted(s, deep)
    assert s.plan(1000).work == [(deep, 10)]  # each costs 1 + 0.1 * 30
    other = admitted(s, Line(200))[0]
    assert s.plan(1000).work == [(deep, 10)]
    deep.target = 101
    assert s.plan(1000).work == [(deep, 1), (other, 36)]


def test_scored_rows_are_few_and_a_chunk_ends_with_them() -> None:
    s = scheduler(step_tokens=32, scored_rows=4)
    a, b = admitted(s, Line(20, scored_from=6, scored_to=15), Line(9, scored_from=0, scored_to=8))
    run = Slabs(s, 100)
    rows = [dict(run.step()[0].work) for _ in range(5)]
    assert rows[0] == {a: 10}
    assert rows[1] == {a: 4}
    assert rows[2] == {a: 1, b: 3}
    assert rows[3] == {a: 5, b: 4}
    assert rows[4] == {b: 1}


def test_the_paused_are_left_out_and_come_back_to_their_place() -> None:
    s = scheduler()
    a, b, c = admitted(s, *(Line(1, 9) for _ in range(3)))
    run = Slabs(s, 100)
    s.pause(a)
    s.pause(a)
    assert run.step()[0].work == [(b, 1), (c, 1)]
    s.resume(a)
    s.resume(a)
    assert run.step()[0].work == [(a, 1), (b, 1), (c, 1)]
    s.pause(b)
    s.finish(b)
    assert run.step()[0].work == [(a, 1), (c, 1)]


def test_nothing_to_do() -> None:
    s = scheduler()
    assert s.plan(5) == Plan()
    s.pause(admitted(s, Line(3))[0])
    assert s.plan(5) == Plan()


def test_a_late_answer_does_not_cost_a_sequence_its_place() -> None:
    s = scheduler(step_tokens=8)
    first, second = Line(20), Line(20)
    s.admit(second, 8)
    s.admit(first, 7)
    assert s.running == [first, second]
    assert s.plan(100).work == [(first, 8)]


def test_without_a_slab_a_sequence_sits_the_step_out() -> None:
    s = scheduler()
    a, b, c = admitted(s, Line(4, 9), Line(3, 9), Line(4, 9))
    run = Slabs(s, 3)
    assert len(run.step()[0].work) == 3
    assert run.step()[0] == Plan([(b, 1)], missed=2)
    run.free = 1
    assert run.step()[0] == Plan([(a, 1)], missed=2)
    run.free = 9
    assert run.step()[0] == Plan([(a, 1), (b, 1), (c, 1)])


def test_a_chunk_ends_where_the_slabs_do() -> None:
    s = scheduler()
    a, b = admitted(s, Line(14), Line(9))
    assert s.plan(3).work == [(a, 12)]
    assert s.plan(4).work == [(a, 14)]
    assert s.plan(5).work == [(a, 14), (b, 2)]
    assert s.plan(0) == Plan()


def test_slabs_are_wanted_before_they_are_needed() -> None:
    s = scheduler(step_tokens=16)
    assert (s.wanted(), s.wanted([1]), s.wanted([1000]), s.wanted([1] * 9)) == (0, 1, 8, 9)
    a = admitted(s, Line(100, 400))[0]
    assert (s.wanted(), s.wanted([1000]), s.wanted([1, 1])) == (8, 9, 10)
    a.n_slabs = 4
    assert s.wanted() == 4
    a.position, a.n_slabs = 92, 23
    assert (s.wanted(), s.wanted([5])) == (18, 20)  # its prompt ends in this step: 8 rows and AHEAD - 1 behind them
    s.pause(a)
    assert s.wanted() == 0
    s.resume(a)
    a.position, a.target, a.n_slabs = 107, 108, 27
    assert s.wanted() == AHEAD // SLAB
    a.position, a.target, a.n_slabs = 496, 497, 124
    assert s.wanted() == 1  # for all but its last token, which is never computed


@st.composite
def lines(draw: st.DrawFn) -> list[Line]:
    prompts = draw(st.lists(st.integers(1, 60), min_size=1, max_size=12))
    scored = [sorted((draw(st.integers(0, prompt)), draw(st.integers(0, prompt)))) for prompt in prompts]
    return [Line(prompt, draw(st.integers(1, 20)), *rows) for prompt, rows in zip(prompts, scored, strict=True)]


@given(lines(), st.integers(1, 12), st.integers(8, 40), st.randoms())
def test_everybody_ends_and_no_step_waits_for_slabs(lines, max_seqs, step_tokens, random) -> None:
    """Joining, pausing and resuming at random: the bounds of a step hold and each text ends; with what was wanted a
    step before no decode row ever misses a slab."""
    s = scheduler(max_seqs, step_tokens)
    run, waiting, ended = Slabs(s, 0), list(lines), 0
    for turn in range(20_000):
        if waiting and random.random() < 0.3:
            s.admit(waiting.pop(), next(ARRIVALS), owner=random.randrange(3))
        if s.running and turn < 200 and random.random() < 0.1:
            s.pause(random.choice(s.running))
        if s.paused and (turn >= 200 or random.random() < 0.3):
            s.resume(random.choice(s.paused))
        before = {line: line.position for line in s.running}
        run.free = s.wanted()
        plan, gone = run.step()
        assert not plan.missed
        assert len({id(line) for line, _ in plan.work}) == len(plan.work) <= max_seqs
        assert sum(rows for _, rows in plan.work) <= max(step_tokens, len(plan.work) + LEAST_CHUNK)
        scored = 0
        for line, rows in plan.work:
            assert rows > 0
            start, end = before[line], before[line] + rows
            assert not (start < line.scored_to < end)
            scored += max(0, min(end, line.scored_to) - max(start, line.scored_from))
        assert scored <= 4
        ended += len(gone)
        if ended == len(lines):
            return
    pytest.fail(f"{len(lines) - ended} texts never end")
