"""Which rows go into the next step: continuous batching as pure data.

A sequence has tokens known and tokens computed; a step computes the next rows of some sequences. Decode rows (one token
from its target) of all running sequences go first, then prefill chunks within the step's budget, so that the step stays
as short as was promised. The budget counts rows; one deep in a text, which looks at many keys, counts more. It goes to
the owner who has had least of it (start-time fair queueing), and of one owner's sequences to the oldest: who comes with
a short prompt does not wait for the end of somebody else's long one.
Sequences join, leave and pause between any two steps. One for which there is no KV slab sits the step out: slabs are
asked for some steps ahead (wanted()), and who gives way when there are too few is not decided here.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from .pace import Pace

LEAST_CHUNK = 8  # rows of prefill a step always has room for, however many decode
CROWD = 8  # texts that wait for prefill: for each so many of them a step with streams has another chunk
AHEAD = 64  # decode steps for which slabs are asked for in advance: a small model makes them in 10 ms


class Text(Protocol):
    """What is scheduled; nothing here changes it. Logits of rows [scored_from, scored_to) are scored, and a step must
    not reach across scored_to. n_slabs: those of its table."""

    position: int  # tokens computed
    target: int  # tokens to be computed
    scored_from: int
    scored_to: int
    n_slabs: int
    sees: int  # most keys one of its queries sees
    most: int  # tokens that will ever be computed


T = TypeVar("T", bound=Text)


@dataclass(slots=True)
class Plan(Generic[T]):
    """work: (sequence, rows) of the step. missed: decode rows that sit it out for want of a slab."""

    work: list[tuple[T, int]] = field(default_factory=list)
    missed: int = 0


class Scheduler(Generic[T]):
    """The sequences of one worker. running and paused are in order of arrival."""

    def __init__(self, max_seqs: int, step_tokens: int, scored_rows: int, slab_tokens: int,
                 key_cost: float = 0.0, bound: float = float("inf"), gentle: int | None = None) -> None:
        """Most sequences, tokens and scored rows of a step; it has more tokens only where decode rows leave less than
        LEAST_CHUNK. key_cost: what a key costs that a row looks at, as a share of the row itself. bound: seconds that a
        prefill may add to a step; how much of it there is follows from what steps take. gentle: rows of prefill in
        a step in which streams go on; more of them for each CROWD that waits."""
        self.max_seqs, self.step_tokens, self.scored_rows = max_seqs, step_tokens, scored_rows
        self.slab_tokens, self._key_cost = slab_tokens, key_cost
        self._pace = Pace(step_tokens, LEAST_CHUNK, bound)
        self._gentle = step_tokens if gentle is None else gentle
        self._decoded = self._prefilled = 0.0  # costs of the step planned last
        self.running: list[T] = []
        self.paused: list[T] = []
        self._arrivals: dict[T, int] = {}
        self._owners: dict[T, int] = {}
        self._had: dict[int, float] = {}  # budget by owner, while somebody waits for some
        self._turn = 0.0  # what the owner served last had had before

    def admit(self, text: T, arrival: int, owner: int = 0) -> None:
        """Ahead of all whose arrival is a greater number. owner: whose share of the budget it takes."""
        self._arrivals[text], self._owners[text] = arrival, owner
        insort(self.running, text, key=self._arrivals.__getitem__)

    def finish(self, text: T) -> None:
        (self.paused if text in self.paused else self.running).remove(text)
        del self._arrivals[text], self._owners[text]

    def pause(self, text: T) -> None:
        """Leaves the batch. Idempotent."""
        self._move(text, self.running, self.paused)

    def resume(self, text: T) -> None:
        """Back to its place by arrival. Idempotent."""
        self._move(text, self.paused, self.running)

    def _move(self, text: T, source: list[T], target: list[T]) -> None:
        if text in source:
            source.remove(text)
            insort(target, text, key=self._arrivals.__getitem__)

    def plan(self, free: int) -> Plan[T]:
        """The next step, given so many free slabs. Without work there is nothing to do until something changes."""
        step = _Step(self, free)
        step.decode()
        self._decoded = sum(self.cost(text) for text, _ in step.plan.work)
        self._prefilled = step.prefill(min(self.step_tokens - self._decoded, self._pace.rows), self._gentle)
        return step.plan

    def took(self, seconds: float) -> None:
        """The step that was planned last lasted so long."""
        if self._prefilled:
            self._pace.took(self._prefilled, seconds * self._prefilled / (self._prefilled + self._decoded))

    def wanted(self, coming: Sequence[int] = ()) -> int:
        """Slabs that the running sequences will take within two steps, decoding ones within AHEAD. coming: tokens of
        each sequence that may be admitted meanwhile; it takes one at once."""
        count, budget, size = 0, 2 * self.step_tokens, self.slab_tokens
        for text in self.in_turn(self.running):
            left = rows = text.target - text.position
            if left > 1:
                rows = min(left, budget)
                budget -= rows
            if rows == left:  # decodes from there on
                rows = min(rows + AHEAD - 1, text.most - text.position)
            count += max(0, -(-(text.position + rows) // size) - text.n_slabs)
        return count + max(-(-min(sum(coming), budget) // size), len(coming))

    def in_turn(self, texts: list[T]) -> list[T]:
        """Of whom the budget goes to the first, then to the next."""
        return sorted(texts, key=lambda text: self._had_by(self._owners[text])) if self._had else texts

    def charge(self, text: T, cost: float) -> None:
        """It was given so much of a step's budget."""
        owner = self._owners[text]
        self._turn = self._had_by(owner)
        self._had[owner] = self._turn + cost
        if len(self._had) > 2 * self.max_seqs:
            self._had = {owner: had for owner, had in self._had.items() if had > self._turn}

    def all_had(self) -> None:
        """Nobody waits for any: it begins anew."""
        self._had.clear()
        self._turn = 0.0

    def _had_by(self, owner: int) -> float:
        """Who was away is not owed anything."""
        return max(self._had.get(owner, 0.0), self._turn)

    def cost(self, text: T) -> float:
        """Of the next row of text, in rows at the beginning of one."""
        return 1 + self._key_cost * min(text.position, text.sees)


class _Step(Generic[T]):
    """One plan in the making."""

    def __init__(self, scheduler: Scheduler[T], free: int) -> None:
        self._s, self._free, self._score_room = scheduler, free, scheduler.scored_rows
        self.plan: Plan[T] = Plan()

    def decode(self) -> None:
        work, slab_tokens = self.plan.work, self._s.slab_tokens
        for text in self._s.running:
            position = text.position
            if text.target - position != 1 or position < text.scored_to or len(work) == self._s.max_seqs:
                continue
            if position == text.n_slabs * slab_tokens:
                if not self._free:
                    self.plan.missed += 1
                    continue
                self._free -= 1
            work.append((text, 1))

    def prefill(self, budget: float, gentle: int) -> float:
        """What it costs. budget: in rows at the beginning of a text; gentle: of it for each CROWD of texts that
        wait, while others decode."""
        waiting = [text for text in self._s.running
                   if text.target - text.position > 1 or text.position < text.scored_to]  # fmt: skip
        if not waiting:
            self._s.all_had()
            return 0.0
        decoding = len(self.plan.work)
        if decoding:
            budget = min(budget, gentle * max(1, len(waiting) // CROWD))
        most = budget
        for text in self._s.in_turn(waiting)[: self._s.max_seqs - decoding]:
            cost, first = self._s.cost(text), len(self.plan.work) == decoding
            rows = self._chunk(text, max(int(budget / cost), LEAST_CHUNK if first else 0))
            budget -= rows * cost
            if rows:
                self._s.charge(text, rows * cost)
        return most - budget

    def _chunk(self, text: T, most: int) -> int:
        """Adds a chunk of at most so many rows, within the scored rows and the slabs left. Returns its rows."""
        rows = min(text.target - text.position, most)
        if text.position < text.scored_to:
            unscored = max(text.scored_from - text.position, 0)
            rows = min(rows, text.scored_to - text.position, unscored + self._score_room)
            self._score_room -= max(rows - unscored, 0)
        slab_tokens = self._s.slab_tokens
        rows = min(rows, (text.n_slabs + self._free) * slab_tokens - text.position)
        if rows > 0:
            self._free -= max(0, -(-(text.position + rows) // slab_tokens) - text.n_slabs)
            self.plan.work.append((text, rows))
        return rows
