"""The queue and the fair share: pure, so a model can be compared with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from colibri_daemon.dispatcher.drain import RETRY_MOST_MS, RETRY_UNKNOWN_MS
from colibri_daemon.dispatcher.fairness import MAX_OWNERS, FairShare
from colibri_daemon.dispatcher.places import behind
from colibri_daemon.dispatcher.queue import LOOK_MOST, PASSES_MOST, RESERVE, RequestQueue
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule


@dataclass(eq=False)
class Request:
    key: int
    priority: int = 0
    owner: Any = "a"
    cost: int = field(default=1)
    length: int = 10
    arrived: float = 0.0
    deadline: float = 300.0


PATIENCE = 30.0


def start(priority: int) -> float:
    """Seconds that a priority is worth."""
    return PATIENCE / 3 * priority / (1 + abs(priority))


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
    queue = RequestQueue(bounds.get("requests", 1000), bounds.get("tokens", 10_000), 0.0, PATIENCE)
    for request in requests:
        assert queue.offer(request, 0.0) is None
    return queue


def test_arrival_then_priority() -> None:
    assert drain(filled(*(Request(key) for key in range(5)))) == [0, 1, 2, 3, 4]
    assert drain(filled(Request(0), Request(1, priority=5), Request(2, priority=-5), Request(3, priority=5))) == [
        1, 3, 0, 2
    ]  # fmt: skip


def test_a_priority_is_a_head_start() -> None:
    """The largest gap is 20 s of the 30 s that a request waits at most; 1 instead of 0 is 5 s."""
    later = [Request(1, priority=1, arrived=4.9), Request(2, priority=1, arrived=5.1)]
    assert drain(filled(Request(0), *later)) == [1, 0, 2]
    assert drain(filled(Request(0, priority=-100), Request(1, priority=100, arrived=19.7))) == [1, 0]
    assert drain(filled(Request(0, priority=-100), Request(1, priority=100, arrived=20.0))) == [0, 1]


@given(st.lists(st.tuples(st.integers(-100, 100), st.sampled_from("ab")), min_size=1, max_size=12), st.integers(1, 5))
def test_nobody_starves(crowd: list[tuple[int, str]], each: int) -> None:
    """One of the lowest priority against a crowd that comes again and again, and one is served per second."""
    queue, now, key = filled(Request(0, priority=-100, owner="c")), 0.0, 0
    while (head := queue.head()).key:
        assert now < 2 / 3 * PATIENCE + len(crowd) * each
        for priority, owner in crowd[: 1 + each]:
            key += 1
            if len(queue) < len(crowd) * each:
                queue.offer(Request(key, priority, owner, arrived=now), now)
        queue.take(head, now)
        now += 1.0


def test_the_nearest_deadline_of_an_owners_goes_first() -> None:
    queue = filled(Request(0), Request(1, deadline=5.0), Request(2, owner="b", deadline=9.0), Request(3, deadline=4.0))
    assert drain(queue) == [3, 2, 1, 0]


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
    queue = RequestQueue(100, 10_000, 0.0, PATIENCE, max_passes=1)
    for request in (Request(0), Request(1, priority=-1), Request(2, priority=-1)):
        queue.offer(request, 0.0)
    queue.take(queue.choose(only(1, 2)), 0.0)
    assert queue.choose(only(2)) is None
    queue.offer(Request(3, priority=1), 0.0)
    assert queue.choose(only(2, 3)).key == 3
    queue.put_back([Request(4)])
    assert [request.key for request in queue] == [4, 3, 0, 2]


def test_nobody_passes_an_owner_who_has_fewer_places() -> None:
    queue = filled(Request(0, owner="b"), Request(1, owner="a"), Request(2, owner="c"))
    queue.held = {"a": 3, "b": 2, "c": 2}
    assert queue.choose(only(1, 2)).key == 2
    assert queue.choose(only(1)) is None
    assert queue.choose(only(0, 1)).key == 0


def test_who_has_fewer_places_comes_before_all_but_the_lost() -> None:
    queue = filled(Request(0, priority=9), Request(1, owner="b"), Request(2, owner="b", priority=-1))
    queue.put_back([Request(3, priority=-9)])
    assert drain(filled(*queue)) == [0, 1, 2, 3]
    queue.held = {"a": 1}
    assert not queue.is_owed_a_place
    assert [request.key for request in queue] == [3, 1, 2, 0]
    queue.held = {"a": 2}
    assert queue.is_owed_a_place
    assert [request.key for request in queue] == [3, 1, 2, 0]


def test_suspects_wait_apart() -> None:
    queue = filled(Request(1, cost=5))
    queue.put_apart(suspect := Request(0, priority=9))
    assert (len(queue), queue.tokens, queue.apart) == (2, 6, 1)
    assert [request.key for request in queue] == [1]
    assert sorted(request.key for request in queue.everybody()) == [0, 1]
    assert queue.choose_apart(only(1)) is None
    assert queue.choose_apart(only(0)) is suspect
    clock = queue.share.clock("a")
    queue.take(suspect, 0.0)
    assert (len(queue), queue.apart, queue.share.clock("a")) == (1, 0, clock)


def test_only_so_many_are_looked_at() -> None:
    looked: list[int] = []
    queue = filled(*(Request(key) for key in range(2 * LOOK_MOST)))
    assert queue.choose(lambda request: bool(looked.append(request.key))) is None
    assert looked == list(range(LOOK_MOST))


def test_bounds() -> None:
    queue = filled(Request(0, cost=9000), requests=2)
    full = queue.offer(Request(1, owner="b", cost=1001), 0.0)
    assert (full.bound, full.limit, full.retry_after_ms) == ("queue_tokens", 10_000, RETRY_UNKNOWN_MS)
    assert queue.offer(Request(1, owner="b", cost=1000), 0.0) is None
    assert queue.offer(Request(2, owner="b", cost=0), 0.0).bound == "queue_full"
    drain(queue)
    assert queue.offer(Request(3, cost=50_000), 0.0) is None  # larger than the bound, but alone


def test_the_last_eighth_is_for_those_who_have_less_than_half() -> None:
    queue, most = RequestQueue(80, 80_000, 0.0, PATIENCE), 80 - 80 // RESERVE
    assert fill(queue, 0, 0.0) == most
    assert queue.offer(Request(100), 0.0).limit == most
    assert [queue.offer(Request(200 + n, owner="b"), 0.0) for n in range(10)] == [None] * 10
    assert queue.offer(Request(300, owner="b"), 0.0).limit == 80
    queue = RequestQueue(1000, 80, 0.0, PATIENCE)
    assert fill(queue, 0, 0.0) == 70
    assert queue.offer(Request(200, owner="b", cost=10), 0.0) is None


def test_what_comes_back_is_always_taken() -> None:
    queue = filled(Request(5), requests=1)
    queue.put_back([Request(1, cost=20_000), Request(2)])
    assert (len(queue), queue.tokens) == (3, 20_002)
    assert queue.offer(Request(6), 0.0).bound == "queue_full"


class Against(RuleBasedStateMachine):
    """The queue against a plain list."""

    @initialize()
    def start(self) -> None:
        self.queue = RequestQueue(7, 40, 0.0, PATIENCE, max_passes=2)
        self.passes: dict[int, int] = {}
        self.waiting: list[Request] = []
        self.back: list[Request] = []
        self.apart: list[Request] = []
        self.taken: list[Request] = []
        self.now, self.key = 0.0, 0

    @rule(priority=st.integers(-1, 1), owner=st.sampled_from("abc"), cost=st.integers(0, 30), wait=st.floats(0, 10),
          deadline=st.floats(1, 20))
    def offer(self, priority: int, owner: str, cost: int, wait: float, deadline: float) -> None:
        self.now += wait
        self.key += 1
        request = Request(self.key, priority, owner, cost, self.now, self.now + deadline)
        everything = self.waiting + self.back + self.apart
        tokens = [(r.owner == owner, r.cost) for r in everything]
        reserved = 5 if 2 * sum(cost for mine, cost in tokens if mine) > sum(cost for _, cost in tokens) else 0
        fits = len(everything) < 7 and (not everything or sum(cost for _, cost in tokens) + cost <= 40 - reserved)
        full = self.queue.offer(request, self.now)
        assert (full is None) == fits
        if fits:
            self.waiting.append(request)
        else:
            assert 0 < full.retry_after_ms <= RETRY_MOST_MS

    @staticmethod
    def heads(requests: list[Request]) -> list[Request]:
        """The first of each line."""
        ordered = sorted(requests, key=lambda r: (r.deadline, r.key), reverse=True)
        return list({(r.owner, r.priority): r for r in ordered}.values())

    @rule(held=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4)))
    def places_change(self, held: dict[str, int]) -> None:
        self.queue.held = held

    @precondition(lambda self: self.waiting or self.back)
    @rule(wait=st.floats(0, 10))
    def take(self, wait: float) -> None:
        self.now += wait
        head = self.queue.head()
        if self.back:
            assert head is min(self.back, key=lambda r: r.key)
            self.back.remove(head)
        else:
            owed = behind(self.queue.held, {r.owner for r in self.waiting + self.back + self.apart}, 1)
            equals = [r for r in self.waiting if (r.owner in owed) == (head.owner in owed)]
            assert not owed & {r.owner for r in self.waiting} or head.owner in owed
            heads = self.heads(equals)
            assert head in heads
            first = min(heads, key=lambda r: (r.arrived - start(r.priority), -r.priority))
            assert head.priority == first.priority
            assert all(self.queue.share.clock(head.owner) <= self.queue.share.clock(r.owner)
                       for r in heads if r.priority == head.priority)
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
        chosen, expected = self.queue.choose(lambda r: r in fitting), self.expected(order, fitting)
        assert chosen is expected
        if chosen is None:
            return
        for request in order[: order.index(chosen)]:
            self.passes[request.key] = self.passes.get(request.key, 0) + 1
        self.queue.take(chosen, self.now)
        self.passes.pop(chosen.key, None)
        (self.waiting if chosen in self.waiting else self.back).remove(chosen)
        self.taken.append(chosen)

    def expected(self, order: list[Request], fitting: list[Request]) -> Request | None:
        places = lambda r: self.queue.held.get(r.owner, 0)  # noqa: E731
        stuck: list[Request] = []
        for request in order:
            if all(places(request) <= places(other) for other in stuck):
                if request in fitting:
                    return request
                if self.passes.get(request.key, 0) >= 2:
                    return None
                stuck.append(request)
        return None

    @precondition(lambda self: self.taken)
    @rule(choice=st.randoms(use_true_random=False))
    def be_suspected(self, choice: Any) -> None:
        request = choice.choice(self.taken)
        self.taken.remove(request)
        self.queue.put_apart(request)
        self.apart.append(request)

    @precondition(lambda self: self.apart)
    @rule()
    def be_tried(self) -> None:
        assert self.queue.choose_apart(lambda _: True) is self.apart[0]
        self.queue.take(self.apart[0], self.now)
        self.taken.append(self.apart.pop(0))

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
        everything = self.waiting + self.back + self.apart
        assert len(self.queue) == len(everything)
        assert self.queue.tokens == sum(r.cost for r in everything)
        assert (self.queue.head() is None) == (not self.waiting + self.back)
        assert sorted(r.key for r in self.queue.everybody()) == sorted(r.key for r in everything)


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
