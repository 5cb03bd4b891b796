"""What a step of the whole model will take, and what follows for clients: from the steps that were timed on a slice.

    step(work) = layers / slice x (body(rows) + attention) + head(texts that draw)

body: the slice's steps at the start of a text, between those measured on a line; attention: what a key adds that a row
looks back at; head: what drawing a token of each text adds. A prompt's way through the daemon is played through with
the worker's own scheduler, the predicted seconds being its clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..common.facts import ModelFacts
from ..common.settings import Settings
from ..worker.calibrate import Calibration, Timing, choose
from ..worker.scheduler import Scheduler
from .probe import DEEP_ROWS, Probed

_FEW, _MANY = 8, 128  # rows of the steps that a worker measures at its start (worker/calibrate.py)


class Line:
    """A function between points that are known, and beyond them as steep as between the last two."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        self._points = sorted(dict(points).items())

    def __call__(self, x: float) -> float:
        points = self._points
        if len(points) == 1:
            return points[0][1]
        i = min(max(bisect_right(points, (x, float("inf"))), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[i - 1], points[i]
        return max(0.0, y0 + (x - x0) * (y1 - y0) / (x1 - x0))


class Steps:
    """Predicted seconds of a worker's steps."""

    def __init__(self, probed: Probed, streams: int, depth: int) -> None:
        """streams, depth: as asked for in probe.Question."""
        p, counts = probed, sorted({1, streams})
        self._scale = p.of / p.layers
        start = [s for s in p.steps if not s.depth and not s.draws]
        self._body = Line((s.streams * s.rows, s.seconds) for s in start)
        self._head = Line((n, max(0.0, p.seconds(n, 1, 0, draws=True) - p.seconds(n, 1, 0))) for n in counts)
        self._decode_key = Line((n, self._per_key(p.seconds(n, 1, depth), p.seconds(n, 1, 0), n * depth))
                                for n in counts)  # fmt: skip
        self._prefill_key = self._per_key(p.seconds(1, DEEP_ROWS, depth), self._body(DEEP_ROWS), DEEP_ROWS * depth)

    @staticmethod
    def _per_key(deep: float, shallow: float, keys: int) -> float:
        return max(0.0, deep - shallow) / keys if keys else 0.0

    def decode(self, streams: int, keys: int) -> float:
        """A token each of so many texts that see so many keys each."""
        return self.step(streams, streams * keys, 0, 0, streams)

    def prefill(self, rows: int, keys: int, draws: int = 1) -> float:
        """Rows of one text, after so many that each of them sees."""
        return self.step(0, 0, rows, rows * keys, draws)

    def step(self, decoding: int, decode_keys: int, rows: int, prefill_keys: int, draws: int) -> float:
        """keys: seen, summed over rows; those of a chunk among themselves are in body."""
        attention = decode_keys * (self._decode_key(decoding) if decoding else 0.0) + prefill_keys * self._prefill_key
        return self._scale * (self._body(decoding + rows) + attention) + (self._head(draws) if draws else 0.0)

    def calibration(self, facts: ModelFacts, depth: int, step_tokens: int) -> Calibration:
        """What a worker will find at its start."""
        short, long, deep = (Timing(rows, keys, self.prefill(rows, keys))
                             for rows, keys in ((_FEW, 0), (_MANY, 0), (_FEW, depth)))  # fmt: skip
        return choose(short, long, deep, step_tokens)


@dataclass(eq=False)
class _Text:
    """As the scheduler sees it; has all its slabs."""

    target: int
    sees: int
    position: int = 0
    scored_from: int = 0
    scored_to: int = 0
    n_slabs: int = 1 << 30
    most: int = 1 << 30
    first: float = field(default=0.0)  # seconds until its first token; 0: not yet


def first_tokens(steps: Steps, facts: ModelFacts, found: Calibration, prompt: int, texts: int,
                 settings: Settings) -> list[float]:
    """Seconds until each of so many prompts that come at the same moment, to one worker, has its first token; sorted.
    texts: at most max_seqs."""
    bound = math.inf if settings.step_tokens else found.stall
    scheduler: Scheduler[_Text] = Scheduler(settings.max_seqs, found.chunk, 0, facts.slab_tokens, found.key_cost, bound,
                                        found.gentle)
    sees = facts.pinned + facts.window if facts.window else prompt + 1
    waiting = [_Text(prompt, sees) for _ in range(texts)]
    for i, text in enumerate(waiting):
        scheduler.admit(text, i)
    now = 0.0
    while any(not text.first for text in waiting):
        work = scheduler.plan(1 << 30).work
        now += (seconds := _seconds(steps, work))
        scheduler.took(seconds)
        for text, rows in work:
            text.position += rows
            if text.position == text.target:
                text.first = text.first or now
                text.target += 1
    return sorted(text.first for text in waiting)


def _seconds(steps: Steps, work: list[tuple[_Text, int]]) -> float:
    decoding = [text for text, rows in work if text.first]
    prompts = [(text, rows) for text, rows in work if not text.first]
    draws = len(decoding) + sum(text.position + rows == text.target for text, rows in prompts)
    return steps.step(len(decoding), sum(min(text.position, text.sees) for text in decoding),
                      sum(rows for _, rows in prompts),
                      sum(rows * min(text.position, text.sees) for text, rows in prompts), draws)  # fmt: skip


def distinct_experts(experts: int, top_k: int, rows: int) -> float:
    """Of a layer's experts, how many get at least one of so many rows, if routing is even: E (1 - (1 - k/E)^n)."""
    return experts * (1 - (1 - top_k / experts) ** rows)
