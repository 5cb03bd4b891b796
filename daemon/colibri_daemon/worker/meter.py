"""What this worker counts for metrics, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ..common.counters import Counters


class Text(Protocol):
    """Of a request in the step, before it is computed."""

    id: int
    position: int
    target: int


class Meter:
    """begin() before each step, end() after it. A row is of a prompt if it is not its request's next token."""

    def __init__(self, counters: Counters, routes: int) -> None:
        """routes: experts that a token is given to, over all layers."""
        self._counters, self._routes = counters, routes
        self._durations = {kind: counters.histogram("step_duration_seconds", kind=kind)
                           for kind in ("prefill", "decode", "mixed")}
        self._totals = [counters.total(name) for name in (
            "worker_steps_total", "worker_rows_total", "worker_busy_seconds_total", "expert_tokens_total")]
        self._rows = counters.histogram("iteration_tokens")
        self._stalls = counters.histogram("decode_stall_seconds")
        self._longest: dict[int, float] = {}  # by request whose prompt is being computed: longest step beside others
        self._prompts: list[tuple[int, bool]] = []  # in this step: request, and whether that is all of it
        self._decoding = False

    def begin(self, work: Iterable[tuple[Text, int]]) -> None:
        self._prompts, self._decoding = [], False
        for text, rows in work:
            left = text.target - text.position
            if left > 1:
                self._prompts.append((text.id, left == rows))
            else:
                self._decoding = True

    def end(self, rows: int, seconds: float) -> None:
        kind = "decode" if not self._prompts else "mixed" if self._decoding else "prefill"
        self._durations[kind].observe(seconds)
        self._rows.observe(rows)
        steps, computed, busy, routed = self._totals
        steps.add(1)
        computed.add(rows)
        busy.add(seconds)
        routed.add(rows * self._routes)
        for key, whole in self._prompts:
            if self._decoding:
                self._longest[key] = max(seconds, self._longest.get(key, 0.0))
            if whole and (longest := self._longest.pop(key, None)) is not None:
                self._stalls.observe(longest)

    def missed(self, rows: int) -> None:
        """So many sat the step out."""
        if rows:
            self._counters.add("kv_free_list_misses_total", rows)

    def left(self, key: int) -> None:
        """The request has gone, perhaps in the middle of its prompt."""
        self._longest.pop(key, None)

    def show(self, requests: int, leases: int) -> None:
        self._counters.set("worker_requests_running", requests)
        self._counters.set("kv_leases", leases)
