"""Who gives way, and that everybody comes to an end: the rules with a small pool and random requests."""

from __future__ import annotations

from dataclasses import dataclass

from colibri_daemon.dispatcher.preempt import fits, headroom, victim
from colibri_daemon.dispatcher.queue import RequestQueue
from hypothesis import given, settings
from hypothesis import strategies as st

T = 4  # tokens of a slab


@dataclass(eq=False)
class Request:
    key: int
    priority: int = 0
    paused: bool = False
    preemptions: int = 0
    owner: str = "a"


def test_nobody_gives_way_for_himself() -> None:
    assert victim([]) is None
    assert victim([Request(1)]) is None


def test_priority_then_preemptions_then_age() -> None:
    old, young, low, kept = Request(1), Request(4), Request(2, priority=-1), Request(9, preemptions=1)
    assert victim([old, young, low, kept]) is low
    assert victim([old, young, kept]) is young
    assert victim([old, kept]) is kept


def test_paused_ones_give_way_first() -> None:
    high, paused, young = Request(1, priority=5), Request(2, priority=9, paused=True), Request(3)
    assert victim([high, paused, young]) is paused


def test_who_has_more_places_than_others_gives_way_before_them() -> None:
    many, one = [Request(key, priority=key % 2) for key in range(4)], Request(9, owner="b", priority=-1)
    assert victim([*many, one]) is many[2]
    assert victim([*many[:2], one]) is one


def test_room_to_come_back_grows() -> None:
    assert [headroom(times, running=3) for times in range(5)] == [0, 3, 6, 12, 24]
    assert fits(5, preemptions=0, running=3, available=5)
    assert not fits(5, preemptions=1, running=3, available=7)
    assert fits(5, preemptions=1, running=3, available=8)
    assert fits(5, preemptions=99, running=0, available=0)


requests = st.builds(Request, st.integers(0, 99), st.integers(-1, 1), st.booleans(), st.integers(0, 5),
                     st.sampled_from("abc"))  # fmt: skip


@given(st.lists(requests, max_size=8, unique_by=lambda r: r.key))
def test_the_first_is_never_a_victim(running: list[Request]) -> None:
    active = [r for r in running if not r.paused]
    chosen = victim(running)
    assert (chosen is None) == (len(running) < 2)
    if active:
        assert chosen is not max(active, key=lambda r: (r.priority, -r.key))
        assert chosen is None or chosen.paused or len(active) == len(running)


# ---- a small pool --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """arrives: in which turn. computed: tokens; done: those of them that are output, which a preempted one keeps."""

    key: int
    prompt: int
    output: int
    priority: int
    owner: str
    arrives: int
    paused: bool = False
    preemptions: int = 0
    computed: int = 0
    done: int = 0
    deadline: float = 300.0

    @property
    def length(self) -> int:
        return self.prompt + self.output

    @property
    def arrived(self) -> float:
        return float(self.arrives)

    @property
    def cost(self) -> int:
        return self.prompt + self.done

    @property
    def held(self) -> int:
        return slabs(self.computed)

    @property
    def need(self) -> int:
        return slabs(min(self.prompt + self.output, self.cost + T))


def slabs(tokens: int) -> int:
    return -(-tokens // T)


class Machine:
    """A pool without a prefix cache, and a worker that computes a chunk or a token of each request in a turn: whoever
    is preempted computes all of it again."""

    def __init__(self, total: int, places: int, chunk: int) -> None:
        self.total, self.places, self.chunk = total, places, chunk
        self.queue: RequestQueue[Job] = RequestQueue(1000, 100_000, 0.0, patience=30.0)
        self.running: list[Job] = []
        self.ended: list[Job] = []

    @property
    def available(self) -> int:
        return self.total - sum(job.held for job in self.running)

    def turn(self) -> None:
        self._assign()
        for job in list(self.running):
            if job in self.running:
                self._compute(job)
        assert self.available >= 0

    def _assign(self) -> None:
        while len(self.running) < self.places:
            promised = sum(max(0, job.need - job.held) for job in self.running if job.computed < job.prompt)
            room, running = self.available - promised, len(self.running)
            job = self.queue.choose(lambda j, room=room, n=running: fits(j.need, j.preemptions, n, room))
            if job is None:
                return
            self.queue.take(job, 0.0)
            self.running.append(job)

    def _compute(self, job: Job) -> None:
        """A step of it, for which others give way if need be; it may be one of them."""
        count = min(self.chunk, job.cost - job.computed) if job.computed < job.cost else 1
        while slabs(job.computed + count) - job.held > self.available:
            chosen = victim(self.running)
            if chosen is None:
                raise AssertionError("alone, and it does not fit")
            self._preempt(chosen)
            if chosen is job:
                return
        job.computed += count
        if job.computed >= job.cost:
            job.done = job.computed - job.prompt
        if job.done == job.output:
            self.running.remove(job)
            self.ended.append(job)

    def _preempt(self, job: Job) -> None:
        self.running.remove(job)
        job.preemptions, job.computed = job.preemptions + 1, 0
        self.queue.put_again(job)


@st.composite
def loads(draw: st.DrawFn) -> tuple[Machine, list[Job]]:
    total = draw(st.integers(3, 16))
    jobs = []
    for key in range(draw(st.integers(1, 12))):
        prompt = draw(st.integers(1, total * T - 1))
        output = draw(st.integers(1, total * T - prompt))
        jobs.append(Job(key, prompt, output, draw(st.integers(0, 1)), draw(st.sampled_from("ab")),
                        draw(st.integers(0, 100))))  # fmt: skip
    return Machine(total, draw(st.integers(1, 8)), draw(st.integers(1, 16))), sorted(jobs, key=lambda j: j.arrives)


def run(machine: Machine, jobs: list[Job], most: int) -> None:
    """To the end of all jobs, within so many turns. They arrive in the order of their keys."""
    for turn in range(most):
        for job in jobs:
            if job.arrives == turn:
                assert machine.queue.offer(job, 0.0) is None
        machine.turn()
        if len(machine.ended) == len(jobs):
            return
    raise AssertionError(f"{len(jobs) - len(machine.ended)} of {len(jobs)} have not ended after {most} turns")


@given(loads())
@settings(max_examples=300, deadline=None)
def test_everybody_comes_to_an_end(load: tuple[Machine, list[Job]]) -> None:
    machine, jobs = load
    for key, job in enumerate(jobs):
        job.key = key
    run(machine, jobs, 100 + 2 * sum(job.prompt + job.output for job in jobs))
    for job in jobs:
        before = sum((other.priority, -other.key) > (job.priority, -job.key) for other in jobs)
        assert job.preemptions <= (machine.total.bit_length() + 1) * before


@given(prompt=st.integers(1, 200), count=st.integers(2, 8))
@settings(max_examples=50, deadline=None)
def test_requests_that_all_want_everything_do_not_push_each_other_about(prompt: int, count: int) -> None:
    """Each grows to the size of the pool. Without headroom the youngest is preempted eleven times."""
    machine = Machine(64, places=8, chunk=64)
    jobs = [Job(key, prompt, 64 * T - prompt, 0, "a", 0) for key in range(count)]
    run(machine, jobs, 3000)
    assert [job.key for job in machine.ended] == list(range(count))
    assert max(job.preemptions for job in jobs) <= 64 .bit_length()
