"""Which code runs in which child: one row per kind, as "module:function", imported in the child alone. So the
supervisor depends on none of them, stays small and starts no threads."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

OOM_WORKER, OOM_DISPATCHER = 300, 100  # added to the supervisor's own score: a worker is the one to lose
OOM_POOL = 100
OOM_METRICS = 200
NICE_WORKER = 5  # a worker computes for milliseconds; who answers clients or Prometheus needs microseconds, at once


@dataclass(frozen=True)
class Role:
    """What a child runs. entry: "module:function". oom: how much likelier a victim than the supervisor. nice: how much
    it gives way to the others."""

    title: str
    entry: str
    oom: int
    nice: int = 0

    def load(self) -> Callable[..., int]:
        module, _, name = self.entry.partition(":")
        function: Callable[..., int] = getattr(importlib.import_module(module), name)
        return function


@dataclass(frozen=True)
class Roles:
    """The entries of check and verify take (answer pipe, settings, page), the pool's (control, page, settings, facts,
    arena, journal), the dispatcher's (listener, admin, control, page, settings, facts, number of the generation, of its
    pool, the book of pages), a worker's (link, control, page, settings, facts, arena, model files by name), that of
    metrics (listener, control, page, settings, None, the book). All return an exit code."""

    check: Role = Role("model check", "colibri_daemon.supervisor.tasks:check", OOM_WORKER, NICE_WORKER)
    verify: Role = Role("model verification", "colibri_daemon.supervisor.tasks:verify", OOM_WORKER, NICE_WORKER)
    kvpool: Role = Role("kvpool", "colibri_daemon.kvpool.main:run", OOM_POOL)
    dispatcher: Role = Role("dispatcher", "colibri_daemon.dispatcher.main:run", OOM_DISPATCHER)
    worker: Role = Role("worker", "colibri_daemon.worker.main:run", OOM_WORKER, NICE_WORKER)
    metrics: Role = Role("metrics", "colibri_daemon.exporter.main:run", OOM_METRICS)
