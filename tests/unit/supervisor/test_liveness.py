"""A watch over a counter, with times made up."""

from __future__ import annotations

from colibri_daemon.supervisor.liveness import LONGEST_GAP, Watch


def looks(watch: Watch, times: range, counter: int) -> float:
    return [watch.look(now, counter) for now in times][-1]


def test_a_counter_that_stands_still():
    watch = Watch(0.0)
    assert looks(watch, range(11), counter=7) == 10


def test_a_counter_that_moves():
    watch = Watch(0.0)
    assert [watch.look(now, now) for now in range(100)] == [0.0] * 100


def test_what_counts_may_change():
    """As with a worker that gets work: from then on another counter has to move."""
    watch = Watch(0.0)
    looks(watch, range(60), counter=7)
    assert watch.look(60, (1, 7)) == 0
    assert watch.look(61, (1, 7)) == 1


def test_time_without_the_watcher_does_not_count():
    watch = Watch(0.0)
    looks(watch, range(4), counter=7)
    assert watch.look(1000, 7) == 3 + LONGEST_GAP
    assert watch.look(1001, 7) == 4 + LONGEST_GAP
