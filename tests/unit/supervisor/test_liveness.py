"""A watch over a counter, with times made up."""

from __future__ import annotations

from colibri_daemon.supervisor.liveness import LONGEST_GAP, Watch


def looks(watch: Watch, times: range, counter: int, active: bool = True) -> float:
    return [watch.look(now, counter, active) for now in times][-1]


def test_a_counter_that_stands_still_while_active():
    watch = Watch(0.0)
    assert looks(watch, range(11), counter=7) == 10


def test_a_counter_that_moves():
    watch = Watch(0.0)
    assert [watch.look(now, now, True) for now in range(100)] == [0.0] * 100


def test_idle_time_does_not_count():
    watch = Watch(0.0)
    looks(watch, range(60), counter=7, active=False)
    assert watch.look(60, 7, True) == 1  # since the last look at which it was idle
    assert looks(watch, range(61, 66), counter=7) == 6


def test_time_without_the_watcher_does_not_count():
    watch = Watch(0.0)
    looks(watch, range(4), counter=7)
    assert watch.look(1000, 7, True) == 3 + LONGEST_GAP
    assert watch.look(1001, 7, True) == 4 + LONGEST_GAP
