"""Tokens that the router gave to each expert of each layer: counted by the engine itself, in the workers' pages."""

from __future__ import annotations

from hashlib import sha256
from operator import add

from .pages import EXPERTS_BYTES, Book, Head, Page

WORD = 8
MOST = EXPERTS_BYTES // WORD  # layers × experts; a model that has more is not counted


def begin(page: Page, model: str, layers: int, experts: int) -> memoryview | None:
    """Memory for the engine's counters, layer by layer, in a worker's own page; None if they have no room. What an
    earlier process has counted of the same model stays. model: its id."""
    if not 0 < layers * experts <= MOST:
        return None
    head, shape = page.head, (_digest(model), layers, experts)
    if (head[Head.MODEL], head[Head.LAYERS], head[Head.EXPERTS]) != shape:
        head[Head.MODEL] = 0  # it cannot be read meanwhile
        page.experts[:] = bytes(EXPERTS_BYTES)
        head[Head.LAYERS], head[Head.EXPERTS] = layers, experts
        head[Head.MODEL] = shape[0]
    return page.experts[: WORD * layers * experts]


def tokens(book: Book, model: str) -> tuple[int, list[int]]:
    """(experts of a layer, tokens of each expert layer by layer) of this model, over all workers; (0, []) if nobody
    counts."""
    wanted, width, total = _digest(model), 0, list[int]()
    for page in book.pages():
        if page.head[Head.MODEL] != wanted:
            continue
        width, size = page.head[Head.EXPERTS], page.head[Head.EXPERTS] * page.head[Head.LAYERS]
        own = page.experts[: WORD * size].cast("Q").tolist()
        total = list(map(add, total, own)) if total else own
    return width, total


def _digest(model: str) -> int:
    """Never 0."""
    return int.from_bytes(sha256(model.encode()).digest()[:8], "little") | 1
