"""What a worker counts of its steps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from colibri_daemon.common.counters import LAYOUTS, Counters, read
from colibri_daemon.common.metrics import BY_NAME, Source
from colibri_daemon.common.pages import make_pages
from colibri_daemon.worker.meter import Meter


@dataclass
class Text:
    id: int
    position: int
    target: int


class Metered:
    def __init__(self) -> None:
        (self._page,) = make_pages(1)
        self.counters = Counters(self._page.counters, Source.WORKER)
        self.meter = Meter(self.counters, routes=6)

    def step(self, *work: tuple[Text, int], seconds: float = 0.1) -> None:
        self.meter.begin(work)
        for text, rows in work:
            text.position += rows
        self.meter.end(sum(rows for _, rows in work), seconds)

    def observed(self, name: str, *values: str) -> tuple[int, float]:
        """(how often, sum)."""
        words, first = read(self._page.counters, Source.WORKER), LAYOUTS[Source.WORKER].places[(name, *values)]
        assert words is not None
        *buckets, total = words[first : first + BY_NAME[name].words]
        return int(sum(buckets)), total


def decoding(number: int) -> tuple[Text, int]:
    return Text(number, 99, 100), 1


@pytest.mark.parametrize(("work", "kind"), [
    ([(Text(1, 0, 100), 100)], "prefill"), ([(Text(1, 0, 100), 40)], "prefill"), ([decoding(1)], "decode"),
    ([decoding(1), decoding(2)], "decode"), ([decoding(1), (Text(2, 50, 100), 8)], "mixed"),
    ([(Text(1, 0, 100), 60), (Text(2, 0, 9), 9)], "prefill"),
])  # fmt: skip
def test_a_step_is_of_one_kind(work: list[tuple[Text, int]], kind: str) -> None:
    metered, rows = Metered(), sum(rows for _, rows in work)
    metered.step(*work, seconds=0.25)
    assert metered.observed("step_duration_seconds", kind) == (1, 0.25)
    assert sum(metered.observed("step_duration_seconds", other)[0] for other in ("prefill", "decode", "mixed")) == 1
    assert metered.observed("iteration_tokens") == (1, rows)
    get = metered.counters.get
    assert (get("worker_steps_total"), get("worker_rows_total"), get("worker_busy_seconds_total")) == (1, rows, 0.25)
    assert get("expert_tokens_total") == 6 * rows


def test_the_longest_wait_is_told_once_for_each_prompt() -> None:
    metered = Metered()
    long, short = Text(1, 0, 100), Text(2, 0, 10)
    metered.step(decoding(9), (long, 40), seconds=0.2)
    metered.step(decoding(9), (long, 30), (short, 10), seconds=0.5)
    assert metered.observed("decode_stall_seconds") == (1, 0.5)
    metered.step(decoding(9), (long, 30), seconds=0.3)
    assert metered.observed("decode_stall_seconds") == (2, 1.0)


def test_nobody_waits_for_a_prompt_that_is_alone_or_has_left() -> None:
    metered = Metered()
    metered.step((Text(1, 0, 100), 100))
    gone = Text(2, 0, 100)
    metered.step(decoding(9), (gone, 40))
    metered.meter.left(2)
    metered.step((Text(2, 40, 100), 60))  # the same request, come again
    assert metered.observed("decode_stall_seconds") == (0, 0)


def test_what_is_going_on() -> None:
    metered = Metered()
    metered.meter.show(3, 17)
    metered.meter.missed(0)
    metered.meter.missed(2)
    get = metered.counters.get
    assert [get(name) for name in ("worker_requests_running", "kv_leases", "kv_free_list_misses_total")] == [3, 17, 2]
