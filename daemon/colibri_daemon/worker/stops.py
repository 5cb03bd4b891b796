"""When a request's output ends, and which of its tokens may be sent. Pure.

A stop id or end-of-text token is sent and ends the output. A stop sequence is not sent, so tokens that may be the
start of one are held back until it is decided; whatever else ends the output releases them. Within the first min_tokens
tokens nothing stops: ids are not drawn there (the caller bars them), sequences complete by then are passed over. Where
several sequences end at one token, the longest counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

# A match that ends within a resumed output but not near its end would have ended it; more need not be looked at.
REPLAYED = 64


@dataclass(frozen=True, slots=True)
class Match:
    """What ended an output. kind: "eos", "id" (value: the token) or "sequence" (value: its index)."""

    kind: str
    value: int


@dataclass(slots=True)
class _Node:
    """A prefix of a stop sequence. fail: the node of its longest proper suffix that is a prefix too."""

    depth: int
    next: dict[int, _Node] = field(default_factory=dict)
    fail: _Node | None = None
    found: tuple[int, int] | None = None  # (index, length) of the longest stop sequence that ends here
    held: int = 0  # length of the longest suffix that may still become a stop sequence


class Automaton:
    """Finds stop sequences token by token (Aho and Corasick, "Efficient string matching", 1975)."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self.start = _Node(0)
        for index, sequence in enumerate(sequences):
            self._add(index, sequence)
        self._link()

    def _add(self, index: int, sequence: Sequence[int]) -> None:
        node = self.start
        for token in sequence:
            node = node.next.setdefault(token, _Node(node.depth + 1))
        node.found = node.found or (index, len(sequence))

    def _link(self) -> None:
        """Breadth first, so that the shorter suffix is ready before it is needed."""
        queue = deque((self.start, token, child) for token, child in self.start.next.items())
        while queue:
            parent, token, node = queue.popleft()
            fail = self.step(parent.fail, token) if parent.fail else self.start
            node.fail, node.found = fail, node.found or fail.found
            node.held = node.depth if node.next else fail.held
            queue.extend((node, follower, child) for follower, child in node.next.items())

    def step(self, node: _Node, token: int) -> _Node:
        """The node of the longest suffix of (node's tokens, token) that is a prefix of a stop sequence."""
        at: _Node | None = node
        while at is not None:
            if token in at.next:
                return at.next[token]
            at = at.fail
        return self.start


class Stops:
    """One request's output as it grows.

    count: tokens so far, resumed and held ones included. released: how many of them may be sent. finish: "stop" or
    "length" once the output has ended, or what end() was told; match: what a stop was.
    """

    def __init__(self, max_tokens: int, min_tokens: int = 0, eos_ids: Iterable[int] = (), stop_ids: Iterable[int] = (),
                 sequences: Sequence[Sequence[int]] = ()) -> None:
        self._max, self._min = max_tokens, min_tokens
        self._ends = {id: Match("id", id) for id in stop_ids} | {id: Match("eos", id) for id in eos_ids}
        self._automaton = Automaton(sequences) if sequences else None
        self._node = self._automaton.start if self._automaton else None
        self.count = self.released = 0
        self.finish: str | None = None if max_tokens > 0 else "length"
        self.match: Match | None = None

    @property
    def barred(self) -> list[int]:
        """Ids that must not be drawn next."""
        return list(self._ends) if self.count < self._min else []

    def restore(self, tokens: Sequence[int]) -> None:
        """Output of an earlier attempt, sent already. Before the first push()."""
        self.count = len(tokens) - len(tokens[-REPLAYED:])
        for token in tokens[-REPLAYED:]:
            if self.finish is None:
                self.push(token)
        self.count = self.released = len(tokens)

    def push(self, token: int) -> None:
        """The next token. Not after the finish."""
        self.count += 1
        past_minimum = self.count > self._min
        if past_minimum and token in self._ends:
            self.match = self._ends[token]
            self.end("stop")
        elif self._automaton:
            self._advance(self._automaton, token, past_minimum)
        else:
            self.released = self.count
        if self.finish is None and self.count >= self._max:
            self.end("length")

    def _advance(self, automaton: Automaton, token: int, past_minimum: bool) -> None:
        node = self._node = automaton.step(self._node or automaton.start, token)
        if past_minimum and node.found:
            index, length = node.found
            self.match, self.finish = Match("sequence", index), "stop"
            self.released = max(self.released, self.count - length)
        else:
            self.released = max(self.released, self.count - node.held)

    def end(self, finish: str) -> None:
        """Ends the output for a reason of its own, or of the caller's: "abort", "deadline", "error". What was held back
        is released."""
        self.finish, self.released = finish, self.count
