"""The queue and the fair share: pure, so a model can be compared with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from colibri_daemon.dispatcher.fairness import MAX_OWNERS, FairShare
from colibri_daemon.dispatcher.queue import (
    LOOK_MOST,
    PASSES_MOST,
    RETRY_MOST_MS,
    RETRY_UNKNOWN_MS,
    RequestQueue,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule


@dataclass(eq=False)
class Request:
    key: int
    priority: int = 0
    owner: Any = "a"
    cost: int = field(default=1)


def drain(queue: RequestQueue, now: float = 0.0) -> list[int]:
    keys = []
    for _ in range(len(queue)):
        head = queue.head()
        queue.take(head, now)
        keys.append(head.key)
    assert queue.head() is None
    return keys


def fill(queue: RequestQueue, key: int, now: float) -> int:
    """Offers requests from this key on until one is refused; its key."""
    for offered in range(key, key + 1000):
        if queue.offer(Request(offered), now) is not None:
            return offered
    raise AssertionError("1000 requests and the queue is not full")


def filled(*requests: Request, **bounds: int) -> RequestQueue:
    queue = RequestQueue(bounds.get("requests", 100), bounds.get("tokens", 10_000), 0.0)
    for request in requests:
        assert queue.offer(request, 0.0) is None
    return queue


def test_arrival_then_priority() -> None:
    assert drain(filled(*(Request(key) for key in range(5)))) == [0, 1, 2, 3, 4]
    assert drain(filled(Request(0), Request(1, priority=5), Request(2, priority=-5), Request(3, priority=5))) == [
        1, 3, 0, 2
    ]  # fmt: skip


def test_owners_take_turns_by_tokens() -> None:
    many = [Request(key, owner="a", cost=10) for key in range(4)]
    few = [Request(10 + key, owner="b", cost=20) for key in range(2)]
    assert drain(filled(*many, *few)) == [0, 10, 1, 2, 11, 3]


def test_what_was_generated_counts_too() -> None:
    queue = filled(Request(0, owner="a"), Request(1, owner="a"), Request(2, owner="b"), Request(3, owner="b"))
    queue.take(queue.head(), 0.0)
    queue.share.charge("a", 1000)
    assert drain(queue) == [2, 3, 1]


def test_lost_requests_go_first_whatever_their_priority() -> None:
    queue = filled(Request(5, priority=9))
    queue.put_back([Request(3, priority=-1), Request(2)])
    queue.put_back([Request(1)])
    assert drain(queue) == [1, 2, 3, 5]


def test_a_preempted_request_gets_its_place_by_age_and_is_paid_for() -> None:
    queue = filled(Request(1), Request(2), Request(3, owner="b"), Request(4), Request(5, priority=1))
    first = [queue.head()]
    queue.take(first[0], 0.0)
    for _ in range(2):
        first.append(queue.head())
        queue.take(first[-1], 0.0)
    assert [request.key for request in first] == [5, 3, 1]
    queue.put_again(first[2])
    assert [request.key for request in queue if request.owner == "a"] == [1, 2, 4]
    clock = queue.share.clock("a")
    queue.take(first[2], 0.0)
    assert queue.share.clock("a") == clock


def only(*keys: int) -> Callable[[Request], bool]:
    return lambda request: request.key in keys


def test_small_ones_pass_a_big_one_until_it_has_waited_enough() -> None:
    queue = filled(Request(0, owner="b"), *(Request(key) for key in range(1, 100)))
    for key in range(1, PASSES_MOST + 1):
        assert queue.choose(only(*range(1, 100))).key == key
        queue.take(queue.choose(only(*range(1, 100))), 0.0)
    assert queue.choose(only(*range(1, 100))) is None
    big = queue.choose(lambda _: True)
    assert big.key == 0
    queue.take(big, 0.0)
    assert queue.choose(only(*range(1, 100))).key == PASSES_MOST + 1


def test_any_priority_may_pass_and_whoever_is_first_anyway_does_not_pass() -> None:
    queue = RequestQueue(100, 10_000, 0.0, max_passes=1)
    for request in (Request(0), Request(1, priority=-1), Request(2, priority=-1)):
        queue.offer(request, 0.0)
    queue.take(queue.choose(only(1, 2)), 0.0)
    assert queue.choose(only(2)) is None
    queue.offer(Request(3, priority=1), 0.0)
    assert queue.choose(only(2, 3)).key == 3
    queue.put_back([Request(4)])
    assert [request.key for request in queue] == [4, 3, 0, 2]


def test_only_so_many_are_looked_at() -> None:
    looked: list[int] = []
    queue = filled(*(Request(key) for key in range(2 * LOOK_MOST)))
    assert queue.choose(lambda request: bool(looked.append(request.key))) is None
    assert looked == list(range(LOOK_MOST))


def test_bounds() -> None:
    queue = filled(Request(0, cost=9000), requests=2)
    full = queue.offer(Request(1, cost=1001), 0.0)
    assert (full.bound, full.limit, full.retry_after_ms) == ("queue_tokens", 10_000, RETRY_UNKNOWN_MS)
    assert queue.offer(Request(1, cost=1000), 0.0) is None
    assert queue.offer(Request(2, cost=0), 0.0).bound == "queue_full"
    drain(queue)
    assert queue.offer(Request(3, cost=50_000), 0.0) is None  # larger than the bound, but alone


def test_what_comes_back_is_always_taken() -> None:
    queue = filled(Request(5), requests=1)
    queue.put_back([Request(1, cost=20_000), Request(2)])
    assert (len(queue), queue.tokens) == (3, 20_002)
    assert queue.offer(Request(6), 0.0).bound == "queue_full"


@pytest.mark.parametrize("per_second", [10, 100])
def test_retry_after_follows_the_drain_rate_and_spreads_the_refused(per_second: int) -> None:
    queue = RequestQueue(2, 10_000, 0.0)
    now, key = 0.0, 0
    for _ in range(5 * per_second):
        key = fill(queue, key, now)
        now += 1 / per_second
        queue.take(queue.head(), now)
    times = [queue.retry_after(1, now) for _ in range(20)]
    expected = 1000 / per_second
    assert times[-1] == pytest.approx(times[0] + 19 * expected, rel=0.3)


def test_refused_clients_that_obey_are_admitted() -> None:
    """10,000 refused at once come back when they were told to; the queue drains 1000 a second."""
    queue, now, key = RequestQueue(100, 10_000, 0.0), 0.0, 0
    while now < 1.0:  # so that the rate is known
        queue.offer(Request(key), now)
        queue.take(queue.head(), now)
        key = fill(queue, key + 1, now)
        now += 0.001
    queue._promised = now
    wait = sorted(now + queue.retry_after(1, now) / 1000 for _ in range(10_000))
    assert wait[-1] <= now + RETRY_MOST_MS / 1000
    admitted = 0
    for due in wait:
        while now < due:
            now += 0.001
            if queue.head() is not None:
                queue.take(queue.head(), now)
        admitted += queue.offer(Request(key := key + 1), now) is None
    assert admitted >= 9000


def test_retry_after_is_bounded() -> None:
    queue = RequestQueue(1, 10, 0.0)
    queue.offer(Request(0), 0.0)
    queue.put_back([Request(1)])
    queue.take(queue.head(), 10.0)
    assert max(queue.retry_after(1, 10.0) for _ in range(1000)) == RETRY_MOST_MS


class Against(RuleBasedStateMachine):
    """The queue against a plain list."""

    @initialize()
    def start(self) -> None:
        self.queue = RequestQueue(8, 40, 0.0, max_passes=2)
        self.passes: dict[int, int] = {}
        self.waiting: list[Request] = []
        self.back: list[Request] = []
        self.taken: list[Request] = []
        self.now, self.key = 0.0, 0

    @rule(priority=st.integers(-1, 1), owner=st.sampled_from("abc"), cost=st.integers(0, 30), wait=st.floats(0, 10))
    def offer(self, priority: int, owner: str, cost: int, wait: float) -> None:
        self.now += wait
        self.key += 1
        request = Request(self.key, priority, owner, cost)
        everything = self.waiting + self.back
        fits = len(everything) < 8 and (not everything or sum(r.cost for r in everything) + cost <= 40)
        full = self.queue.offer(request, self.now)
        assert (full is None) == fits
        if fits:
            self.waiting.append(request)
        else:
            assert 0 < full.retry_after_ms <= RETRY_MOST_MS

    @precondition(lambda self: self.waiting or self.back)
    @rule(wait=st.floats(0, 10))
    def take(self, wait: float) -> None:
        self.now += wait
        head = self.queue.head()
        if self.back:
            assert head is min(self.back, key=lambda r: r.key)
            self.back.remove(head)
        else:
            assert head.priority == max(r.priority for r in self.waiting)
            assert head.key == min(r.key for r in self.waiting if (r.priority, r.owner) == (head.priority, head.owner))
            self.waiting.remove(head)
        self.queue.take(head, self.now)
        self.passes.pop(head.key, None)
        self.taken.append(head)

    @precondition(lambda self: self.waiting or self.back)
    @rule(choice=st.randoms(use_true_random=False))
    def take_one_that_fits(self, choice: Any) -> None:
        order = list(self.queue)
        assert sorted(r.key for r in order) == sorted(r.key for r in self.waiting + self.back)
        fitting = [r for r in order if choice.random() < 0.5]
        chosen = self.queue.choose(lambda r: r in fitting)
        passed = order[: order.index(fitting[0])] if fitting else order
        if not fitting or any(self.passes.get(r.key, 0) == 2 for r in passed):
            assert chosen is None
            return
        assert chosen is fitting[0]
        for request in passed:
            self.passes[request.key] = self.passes.get(request.key, 0) + 1
        self.queue.take(chosen, self.now)
        self.passes.pop(chosen.key, None)
        (self.waiting if chosen in self.waiting else self.back).remove(chosen)
        self.taken.append(chosen)

    @precondition(lambda self: self.taken)
    @rule(choice=st.randoms(use_true_random=False))
    def be_preempted(self, choice: Any) -> None:
        request = choice.choice(self.taken)
        self.taken.remove(request)
        self.queue.put_again(request)
        self.waiting.append(request)

    @precondition(lambda self: self.waiting or self.back)
    @rule(choice=st.randoms(use_true_random=False))
    def give_up(self, choice: Any) -> None:
        request = choice.choice(self.waiting + self.back)
        (self.waiting if request in self.waiting else self.back).remove(request)
        self.passes.pop(request.key, None)
        self.queue.remove(request)

    @precondition(lambda self: self.taken)
    @rule(choice=st.randoms(use_true_random=False))
    def come_back(self, choice: Any) -> None:
        lost = choice.sample(self.taken, choice.randint(1, len(self.taken)))
        self.taken = [request for request in self.taken if request not in lost]
        self.queue.put_back(lost)
        self.back += lost

    @invariant()
    def counts_agree(self) -> None:
        everything = self.waiting + self.back
        assert len(self.queue) == len(everything)
        assert self.queue.tokens == sum(r.cost for r in everything)
        assert (self.queue.head() is None) == (not everything)


TestAgainstAList = Against.TestCase
TestAgainstAList.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_nobody_saves_up_a_share() -> None:
    share = FairShare()
    for _ in range(10):
        share.serve("a", 100)
    share.serve("b", 1)  # comes for the first time: as if served as much as the others
    assert share.first(["a", "b"]) == "b"
    share.serve("b", 200)
    assert share.first(["a", "b"]) == "a"


def test_shares_are_even_in_the_long_run() -> None:
    share, served = FairShare(), {"a": 0, "b": 0, "c": 0}
    sizes = {"a": 1, "b": 17, "c": 64}
    for _ in range(10_000):
        owner = share.first(served)
        share.serve(owner, sizes[owner])
        served[owner] += sizes[owner]
    assert max(served.values()) - min(served.values()) <= 2 * max(sizes.values())


def test_owners_that_come_and_go_are_forgotten() -> None:
    share = FairShare()
    for n in range(3 * MAX_OWNERS):
        share.serve(n, 1)
    assert len(share._served) <= MAX_OWNERS
