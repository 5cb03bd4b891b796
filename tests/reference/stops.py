"""When an output ends and what of it may be sent: the rules written out, for comparison with the incremental ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    max_tokens: int
    min_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()


Ending = tuple[str | None, tuple[str, int] | None, int]  # finish, (kind, value) of a stop, tokens that may be sent


def ending(rules: Rules, text: Sequence[int]) -> Ending:
    """What holds once text has been generated, given that nothing ended before its last token."""
    if len(text) > rules.min_tokens:
        for kind, ids in (("eos", rules.eos_ids), ("id", rules.stop_ids)):
            if text[-1] in ids:
                return "stop", (kind, text[-1]), len(text)
        found = [(-len(s), i) for i, s in enumerate(rules.sequences) if _ends_with(text, s)]
        if found:
            length, index = min(found)
            return "stop", ("sequence", index), len(text) + length
    if len(text) == rules.max_tokens:
        return "length", None, len(text)
    return None, None, len(text) - _held(rules, text)


def _held(rules: Rules, text: Sequence[int]) -> int:
    """Length of the longest end of text that begins a stop sequence without being all of it."""
    starts = [sequence[:n] for sequence in rules.sequences for n in range(len(sequence))]
    return max((len(start) for start in starts if _ends_with(text, start)), default=0)


def _ends_with(text: Sequence[int], sequence: Sequence[int]) -> bool:
    return len(sequence) <= len(text) and tuple(text[len(text) - len(sequence) :]) == tuple(sequence)
