"""How evenly the tokens of each layer go to its experts, lately."""

from __future__ import annotations

from collections import deque
from operator import sub

from ..common.experts import tokens
from ..common.pages import Book

WINDOW_SECONDS = 60.0
SAMPLE_SECONDS = 5.0


class Imbalance:
    """Of the last minute: worst layer, and mean of all layers."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._model = ""
        self._seen: deque[tuple[float, list[int]]] = deque()
        self.worst = self.mean = 0.0

    def sample(self, now: float, model: str) -> None:
        """Every SAMPLE_SECONDS. model: the id of the one that serves."""
        experts, counts = tokens(self._book, model)
        seen = self._seen
        if model != self._model or (seen and len(seen[0][1]) != len(counts)):
            seen.clear()
        while seen and now - seen[0][0] > WINDOW_SECONDS:
            seen.popleft()
        seen.append((now, counts))
        self._model = model
        self.worst, self.mean = imbalance(list(map(sub, counts, seen[0][1])), experts)


def imbalance(counts: list[int], experts: int) -> tuple[float, float]:
    """Busiest over mean expert of a layer: (the worst layer's, mean of all layers); zeros if nothing was routed."""
    layers = [counts[at : at + experts] for at in range(0, len(counts), max(1, experts))]
    ratios = [max(layer) * experts / total for layer in layers if (total := sum(layer)) > 0]
    return (max(ratios), sum(ratios) / len(ratios)) if ratios else (0.0, 0.0)
