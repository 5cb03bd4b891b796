"""A worker process from start to end: load the model, measure, say ready, serve."""

from __future__ import annotations

import errno
import math
import mmap
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from colibri_engine import Engine
from colibri_engine._colibri import lib
from colibri_engine.batch import SCORED_ROWS, Batch, Lane
from colibri_engine.container import MANIFEST
from colibri_engine.errors import ColibriError
from colibri_engine.sequence import KvMemory

from ..common import experts, ipc, life, log
from ..common.arena import Arena
from ..common.exit_codes import Exit
from ..common.facts import ModelFacts
from ..common.link import Link
from ..common.pages import Field, Page, State
from ..common.process import huge_file_bytes
from ..common.settings import Settings
from .calibrate import calibrate
from .loop import Loop
from .opening import engine_options
from .pool_kv import PoolKv
from .scheduler import Scheduler

_SLICE = 32 << 20  # bytes of weights between two reports of progress
_MADV_POPULATE_READ = 22  # reports an error where touching a page would raise SIGBUS
_log = log.get("worker")


def run(link: socket.socket, control: socket.socket, page: Page, settings: Settings, facts: ModelFacts,
        arena: Arena, files: dict[str, int]) -> int:  # fmt: skip
    """The process's exit code. link and control are non-blocking; page is this process's own. The link to the pool that
    grants slabs of the arena comes over control. files: the model's, open, by name; the folder has others by now if
    somebody has replaced them."""
    life.arm(page)
    with _stop_signal() as stop:
        page[Field.STATE] = State.LOADING
        try:
            loop, engine, told = _load(Link(link), control, stop, page, settings, facts, arena, files)
        except (ColibriError, OSError, ValueError, MemoryError) as e:
            _log.error("cannot load the model", reason=str(e))
            ipc.send_control(control, {"t": "failed", "reason": str(e) or type(e).__name__})
            return Exit.CANNOT_LOAD
        with closing(engine):
            page[Field.STATE] = State.READY
            ipc.send_control(control, {"t": "ready", **told})
            code = loop.run()
            page[Field.STATE] = State.STOPPING
            return code


@contextmanager
def _stop_signal() -> Iterator[socket.socket]:
    """A socket that becomes readable with SIGTERM."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        handler = signal.signal(signal.SIGTERM, lambda number, frame: None)
        former = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(former)
            signal.signal(signal.SIGTERM, handler)


def _load(link: Link, control: socket.socket, stop: socket.socket, page: Page, settings: Settings,
          facts: ModelFacts, arena: Arena, files: dict[str, int]) -> tuple[Loop, Engine, dict[str, Any]]:
    """Everything up to ready, and what the supervisor may tell of it."""
    _warm([fd for name, fd in files.items() if name != MANIFEST], page)
    cores = lib.colibri_host_threads()
    threads = settings.threads_per_worker(cores)
    if warning := settings.crowding(cores):
        _log.warning("more engine threads than cores", reason=warning)
    counted = experts.begin(page, facts.id, facts.layers, facts.experts)
    engine = Engine.open(facts.folder, threads, populate=True, progress=page.memory[:8],
                         expert_tokens=False if counted is None else counted, files=files,
                         fault_exit=Exit.WEIGHTS_CHANGED, **engine_options(settings, facts))
    try:
        kv = PoolKv(KvMemory(engine.info, arena.slabs, arena.map()), arena.geometry)
        batch = Batch(engine, kv.memory, settings.max_seqs)
        with _unchanged(counted):  # what is computed to measure is nobody's text
            found = calibrate(engine, facts, settings.step_tokens)
        page[Field.SLABS], page[Field.FREE_SLABS] = kv.total, kv.free
        scheduler: Scheduler[Lane] = Scheduler(settings.max_seqs, found.chunk, SCORED_ROWS, facts.slab_tokens,
                                               found.key_cost, math.inf if settings.step_tokens else found.stall,
                                               found.gentle)
        told = {"threads": threads, "chunk": found.chunk, "gentle_chunk": found.gentle,
                "stall_ms": round(1000 * found.stall, 1), "isa": engine.info.isa}
        greeting = [ipc.READY, {"max_seqs": settings.max_seqs, "slabs": kv.total, **told}]
        loop = Loop(engine, batch, kv, link, control, stop, page, scheduler, greeting)
    except BaseException:
        engine.close()
        raise
    _log.info("loaded", slabs=kv.total, **told, huge=round(huge_file_bytes() / facts.weight_bytes, 2))
    return loop, engine, told


@contextmanager
def _unchanged(memory: memoryview | None) -> Iterator[None]:
    before = bytes(memory or b"")
    yield
    if memory is not None:
        memory[:] = before


def _warm(files: list[int], page: Page) -> None:
    """Brings the weights into the page cache a slice at a time, so that loading can be watched. What is not there yet
    comes in huge pages if the file system has them; how a page came in stays until it leaves the cache."""
    sizes = [os.fstat(fd).st_size for fd in files]
    page[Field.TO_LOAD] = sum(sizes)
    for fd, size in zip(files, sizes, strict=True):
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
            with suppress(OSError):  # a kernel without them
                mapped.madvise(mmap.MADV_HUGEPAGE)
            for at in range(0, size, _SLICE):
                end = min(at + _SLICE, size)
                _populate(mapped, at, end)
                page[Field.LOADED] += end - at
                page[Field.PROGRESS] += 1


def _populate(mapped: mmap.mmap, at: int, end: int) -> None:
    """OSError if the file has become shorter."""
    try:
        mapped.madvise(_MADV_POPULATE_READ, at, end - at)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        mapped.madvise(mmap.MADV_WILLNEED, at, end - at)  # a kernel before 5.14
        mapped[at : end : mmap.PAGESIZE]  # noqa: B018 - reading a byte of each page is the point
