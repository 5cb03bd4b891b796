"""A map that works a little ahead on threads: for slabs whose packing, unpacking and reading release the GIL."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_THREADS = min(4, os.cpu_count() or 1)

T = TypeVar("T")


def map_ahead(task: Callable[[int], T], items: Iterable[int]) -> Iterator[T]:
    """The results of task(item) in order, with at most a handful computed and not yet taken."""
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(task, item))
                if len(waiting) > _THREADS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
