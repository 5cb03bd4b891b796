"""When refused clients may come back: the times are kept by whoever obeys them."""

from __future__ import annotations

import pytest
from colibri_daemon.dispatcher.drain import MARGIN, RETRY_MOST_MS, RETRY_UNKNOWN_MS, SLACK
from colibri_daemon.dispatcher.queue import RequestQueue
from test_queue import PATIENCE, Request, fill


@pytest.mark.parametrize("per_second", [10, 100])
def test_retry_after_follows_the_drain_rate_and_spreads_the_refused(per_second: int) -> None:
    queue = RequestQueue(2, 10_000, 0.0, PATIENCE)
    now, key = 0.0, 0
    for _ in range(5 * per_second):
        key = fill(queue, key, now)
        now += 1 / per_second
        queue.take(queue.head(), now)
    times = [queue.retry_after(1, now) for _ in range(20)]
    expected = MARGIN * 1000 / per_second
    assert times[-1] == pytest.approx(times[0] + 19 * expected, rel=0.3)


def test_refused_clients_that_obey_are_admitted() -> None:
    """10,000 refused at once come back when they were told to; the queue drains 1000 a second."""
    queue, now, key = RequestQueue(100, 10_000, 0.0, PATIENCE), 0.0, 0
    while now < 1.0:  # so that the rate is known
        queue.offer(Request(key), now)
        queue.take(queue.head(), now)
        key = fill(queue, key + 1, now)
        now += 0.001
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
    queue = RequestQueue(1, 10, 0.0, PATIENCE)
    queue.offer(Request(0), 0.0)
    queue.put_back([Request(1)])
    queue.take(queue.head(), 10.0)
    assert max(queue.retry_after(1, 10.0) for _ in range(1000)) == RETRY_MOST_MS


def test_before_the_rate_is_known_it_is_guessed_from_what_workers_say() -> None:
    queue = RequestQueue(2, 10_000, 0.0, PATIENCE)
    fill(queue, 0, 0.0)
    assert [queue.offer(Request(9), 0.0).retry_after_ms for _ in range(3)] == [RETRY_UNKNOWN_MS] * 3
    queue.expect(100.0)  # a request of 10 tokens each 100 ms
    times = [queue.offer(Request(9), 0.0).retry_after_ms for _ in range(20)]
    assert times[0] == pytest.approx(1000 * 0.1 * (MARGIN + SLACK * 2), abs=1)
    assert times[-1] - times[0] == pytest.approx(19 * MARGIN * 100, abs=2)
    assert queue.retry_after(1, 0.0) == RETRY_UNKNOWN_MS  # of a request that was not refused for its size
