"""The requests of a scenario: the same for the same scenario, seed and vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

from .arrivals import Closed
from .scenario import Scenario

LOWEST = 3  # ids below are beginnings and ends of texts in most vocabularies


@dataclass(frozen=True, slots=True)
class Request:
    """due: seconds from the beginning, None in a closed loop. leave_after: cancelled when so many tokens have come."""

    number: int
    due: float | None
    prompt: list[int]
    tokens: int
    leave_after: int | None


def schedule(scenario: Scenario) -> Iterator[float | None]:
    """When each request is due; without end in a closed loop that has only a duration."""
    numbers = count() if scenario.requests is None else range(scenario.requests)
    if isinstance(scenario.arrival, Closed):
        yield from (None for _ in numbers)
        return
    for _, due in zip(numbers, scenario.arrival.due(_rng(scenario, "arrival"))):  # noqa: B905  (due has no end)
        if scenario.seconds is not None and due >= scenario.seconds:
            return
        yield due


def requests(scenario: Scenario, vocab: int) -> Iterator[Request]:
    """Prompts are random ids below vocab, so that only what shares a prefix shares anything. Each property has random
    numbers of its own: another length distribution changes neither arrivals nor cancels."""
    ids = range(min(LOWEST, vocab - 1), vocab)
    prompt, output, text, leave = (_rng(scenario, name) for name in ("prompt", "output", "text", "cancel"))
    prefixes = _prefixes(scenario, ids)
    for number, due in enumerate(schedule(scenario)):
        tokens, left, share = scenario.output.draw(output), leave.random() < scenario.cancel.rate, leave.random()
        beginning = text.choice(prefixes) if scenario.prefix and text.random() < scenario.prefix.share else []
        yield Request(number, due, beginning + text.choices(ids, k=scenario.prompt.draw(prompt)), tokens,
                      1 + int(share * tokens) if left else None)


def warmup(scenario: Scenario, vocab: int) -> list[Request]:
    """Like the others, but with other random numbers."""
    if not scenario.warmup:
        return []
    change = {"seed": scenario.seed + 1_000_003, "requests": scenario.warmup, "seconds": None}
    return list(requests(scenario.model_copy(update=change), vocab))


def _prefixes(scenario: Scenario, ids: range) -> list[list[int]]:
    rng, prefix = _rng(scenario, "prefix"), scenario.prefix
    return [rng.choices(ids, k=prefix.length) for _ in range(prefix.count)] if prefix else []


def _rng(scenario: Scenario, name: str) -> Random:
    return Random(f"{scenario.seed}/{name}")
