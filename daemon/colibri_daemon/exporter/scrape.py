"""What /metrics says: numbers from the pages, what the supervisor says of the service, and what the kernel knows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..common.metrics import SLAB_STATES, STATES
from ..common.pages import Book
from .experts import Imbalance
from .exposition import Exposition
from .processes import Usage, descriptors, usage
from .readings import Readings, Rows

STALE_SECONDS = 2.0  # the supervisor speaks every 0.5 s: after this nothing is known to be ready
USABLE_STATES = ("live", "cached", "free")


class Service:
    """The last "state" message of the supervisor (common/ipc.py)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard = -STALE_SECONDS
        self._wall = 0.0
        self.body: dict[str, Any] = {}
        self.about: dict[str, Any] = {}

    def update(self, message: dict[str, Any]) -> None:
        self._heard, self._wall = self._clock(), time.time()
        self.body, self.about = message, message.get("about", {})

    @property
    def known(self) -> bool:
        """What it said last is true now."""
        return self._clock() - self._heard < STALE_SECONDS

    @property
    def ready(self) -> bool:
        return self.known and bool(self.body.get("ready"))

    @property
    def reason(self) -> str:
        return str(self.body.get("reason") or self.body.get("state", "")) if self.known else "nothing is known"

    @property
    def workers(self) -> list[dict[str, Any]]:
        """By slot."""
        found: list[dict[str, Any]] = self.body.get("workers", [])
        return found

    def moved_at(self, worker: dict[str, Any]) -> float:
        """When the worker last made progress, by the wall clock; 0 if it does not run."""
        return self._wall - worker["progress_age_ms"] / 1000 if worker.get("pid") else 0.0


class Scrape:
    """supervisor: its pid."""

    def __init__(self, book: Book, service: Service, imbalance: Imbalance, supervisor: int) -> None:
        self._book, self._service, self._imbalance = book, service, imbalance
        self._supervisor = supervisor
        self._made: tuple[object, Exposition] | None = None

    def text(self) -> bytes:
        workers = self._service.workers
        rows = Readings(self._book).rows(len(workers))
        rows |= self._of_service() | self._of_workers() | self._of_supervisor()
        rows["kv_cache_usage_perc"] = [[_usage(rows)]]
        return self._exposition(len(workers)).text(rows)

    def _exposition(self, workers: int) -> Exposition:
        """Made anew when the model or the number of workers has changed."""
        key = (workers, self._service.about)
        if self._made is None or self._made[0] != key:
            about = self._service.about
            self._made = key, Exposition(str(about.get("model", "")), workers, {
                "build_info": {name: str(about.get(name, "")) for name in ("version", "isa", "protocol")},
                "cache_config_info": _cache(about),
            })
        return self._made[1]

    def _of_service(self) -> Rows:
        service = self._service
        reloaded = service.body.get("reloaded", {})
        return {
            "state": [[float(service.body.get("state") == state) for state in STATES]],
            "ready": [[float(service.ready)]],
            "config_last_reload_success": [[float(reloaded.get("ok", False))]],
            "config_last_reload_success_timestamp_seconds": [[float(reloaded.get("good", 0.0))]],
            "expert_load_imbalance_ratio": [[self._imbalance.worst, self._imbalance.mean]],
        }

    def _of_workers(self) -> Rows:
        service, workers = self._service, self._service.workers
        used = [usage(worker["pid"]) if worker.get("pid") else Usage() for worker in workers]
        return {
            "worker_up": [[float(service.known and worker["up"])] for worker in workers],
            "worker_progress_timestamp_seconds": [[service.moved_at(worker)] for worker in workers],
            "worker_resident_memory_bytes": [[float(found.resident)] for found in used],
            "worker_cpu_seconds_total": [[found.cpu] for found in used],
        }

    def _of_supervisor(self) -> Rows:
        found, (opened, most) = usage(self._supervisor), descriptors(self._supervisor)
        return {
            "process_cpu_seconds_total": [[found.cpu]],
            "process_resident_memory_bytes": [[float(found.resident)]],
            "process_virtual_memory_bytes": [[float(found.virtual)]],
            "process_start_time_seconds": [[found.started]],
            "process_open_fds": [[float(opened)]],
            "process_max_fds": [[float(most)]],
        }


def _usage(rows: Rows) -> float:
    """Share of the slabs that can be used which is in use."""
    slabs = dict(zip(SLAB_STATES, rows["kv_slabs"][0], strict=True))
    usable = sum(slabs[state] for state in USABLE_STATES)
    return slabs["live"] / usable if usable else 0.0


def _cache(about: dict[str, Any]) -> dict[str, str]:
    names = {"block_size": "slab_tokens", "num_gpu_blocks": "slabs", "num_slabs": "slabs", "pinned_tokens": "pinned",
             "window_tokens": "window"}  # fmt: skip
    return {label: str(about.get(name, "")) for label, name in names.items()}
