"""Progress of a long command on stderr: a bar on a terminal, a line every tenth otherwise, nothing if quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Advance = Callable[[int, int], None]  # bytes done, bytes in all


@contextmanager
def progress(what: str, quiet: bool = False, stream: TextIO | None = None) -> Iterator[Advance]:
    """Yields the function to call with (done, total)."""
    stream = stream or sys.stderr
    if quiet:
        yield lambda done, total: None
    elif stream.isatty():
        with _bar(what) as advance:
            yield advance
    else:
        yield _lines(what, stream)


@contextmanager
def _bar(what: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str, stream: TextIO) -> Advance:
    begin, tenths = time.monotonic(), 0

    def advance(done: int, total: int) -> None:
        nonlocal tenths
        now = 10 * done // max(total, 1)
        if now > tenths:
            tenths = now
            print(f"{what}: {10 * now} %, {human(done)}, {time.monotonic() - begin:.0f} s", file=stream, flush=True)

    return advance


def human(size: float) -> str:
    """Bytes in units of 1000, as disks and rich count them."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
