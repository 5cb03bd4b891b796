"""Counters and gauges of the dispatcher. One table declares them, under the names of the exported metrics without the
colibri_ prefix; each combination of name and label value is one number in ``counts``, there from the start. Those of
the KV pool come from its process, by the same names.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colibri_protocol.errors import Code, ProtocolError
from colibri_protocol.messages import StatsReply

if TYPE_CHECKING:
    from .generation import Generations
    from .pool_link import PoolLink
    from .requests import Requests
    from .workers import Worker

FINISHED = ("stop", "length", "abort", "deadline", "error")
PROTOCOL_FAULTS = {
    Code.PROTOCOL: "decode", Code.VERSION: "version", Code.FRAME_TOO_LARGE: "length", Code.READ_TIMEOUT: "timeout",
}  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """values: the closed set that the label takes; without a label there is one number."""

    name: str
    kind: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ("",)


METRICS = (
    Metric("requests_started_total", "counter", "Requests accepted; those finished and those live add up to it."),
    Metric("request_success_total", "counter", "Requests that ended, by how.", "finished_reason", FINISHED),
    Metric("request_errors_total", "counter", "ERROR messages sent.", "code", tuple(code.name for code in Code)),
    Metric("admission_rejections_total", "counter", "Requests not accepted.", "reason",
           ("queue_full", "queue_tokens", "peer_limit", "never_fits", "draining", "not_ready", "poisoned", "invalid")),
    Metric("prompt_tokens_total", "counter", "Prompt tokens of accepted requests."),
    Metric("generation_tokens_total", "counter", "Tokens that workers delivered."),
    Metric("request_takeovers_total", "counter", "Requests that moved off a lost worker."),
    Metric("poison_requests_total", "counter", "Requests that were proven to end their workers."),
    Metric("num_preemptions_total", "counter", "Times that a request gave way to others and waited again."),
    Metric("connections_total", "counter", "Connections by what became of them.", "result",
           ("accepted", "refused_limit", "refused_auth", "emfile")),
    Metric("protocol_errors_total", "counter", "Connections that broke the protocol.", "kind",
           tuple(PROTOCOL_FAULTS.values())),
    Metric("slow_reader_disconnects_total", "counter", "Connections closed because they did not read."),
    Metric("num_requests_running", "gauge", "Requests in workers."),
    Metric("num_requests_waiting", "gauge", "Requests in the queue."),
    Metric("waiting_tokens", "gauge", "Tokens that they have to compute first."),
    Metric("stall_bound_seconds", "gauge", "Longest time that a step is meant to take, of all workers; 0: not known."),
    Metric("connections", "gauge", "Open now.", "state", ("active", "paused")),
    Metric("output_buffer_bytes", "gauge", "Output that clients have not read yet."),
)  # fmt: skip


@functools.cache
def key(name: str, label: str = "", value: str = "") -> str:
    return f'{name}{{{label}="{value}"}}' if label else name


class Stats:
    """counts: by key()."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {key(m.name, m.label, v): 0 for m in METRICS for v in m.values}

    def add(self, name: str, amount: float = 1, **label: str) -> None:
        """KeyError for what the table does not declare."""
        self.counts[key(name, *next(iter(label.items()), ()))] += amount

    def set(self, name: str, amount: float, **label: str) -> None:
        self.add(name, amount - self.counts[key(name, *next(iter(label.items()), ()))], **label)

    def started(self, prompt_tokens: int) -> None:
        self.add("requests_started_total")
        self.add("prompt_tokens_total", prompt_tokens)

    def finished(self, finish: str, error: ProtocolError | None) -> None:
        self.add("request_success_total", finished_reason=finish)
        if error is not None:
            self.add("request_errors_total", code=error.code.name)

    def refused(self, error: ProtocolError) -> None:
        """A request was not accepted."""
        reason = "never_fits" if error.code is Code.NEVER_FITS else getattr(error, "reason", "invalid")
        self.add("admission_rejections_total", reason=reason)
        self.add("request_errors_total", code=error.code.name)

    def fault(self, error: ProtocolError) -> None:
        """A connection is closed for this."""
        self.add("request_errors_total", code=error.code.name)
        if error.code in PROTOCOL_FAULTS:
            self.add("protocol_errors_total", kind=PROTOCOL_FAULTS[error.code])


def report(stats: Stats, requests: Requests, generations: Generations, unread: list[int], paused: int,
           uptime: float) -> StatsReply:
    """STATS_REPLY. unread: bytes of output waiting per connection; paused: connections whose requests are kept back."""
    for name, value in (
        ("num_requests_running", requests.running), ("num_requests_waiting", requests.waiting),
        ("waiting_tokens", requests.waiting_tokens), ("output_buffer_bytes", sum(unread)),
        ("generation_tokens_total", requests.tokens_relayed),
        ("stall_bound_seconds", max((w.stall_ms / 1000 for g in generations for w in g.workers), default=0)),
    ):  # fmt: skip
        stats.set(name, value)
    pool = generations.serving.pool
    stats.set("connections", len(unread) - paused, state="active")
    stats.set("connections", paused, state="paused")
    return StatsReply(
        uptime_s=uptime, running=requests.running, waiting=requests.waiting, waiting_tokens=requests.waiting_tokens,
        connections=len(unread), kv_slabs=slabs_by_state(pool), counters=stats.counts | pool.counters,
        workers=tuple(per_worker(worker, g.pool) for g in generations for worker in g.workers),
    )  # fmt: skip


def slabs_by_state(pool: PoolLink) -> dict[str, float]:
    """live: a worker's own or somebody's request's. Empty until the pool has told."""
    if not pool.slabs:
        return {}
    slabs = dict(pool.slabs)
    return {"live": slabs.pop("leased") + slabs.pop("committed"), **slabs, "total": sum(pool.slabs.values())}


def per_worker(worker: Worker, pool: PoolLink) -> dict[str, float]:
    """kv_leases: slabs that only this worker may use; kv_free_list: of these, not in use; kv_promised: to be taken."""
    return {
        "slot": worker.slot, "epoch": worker.epoch, "pid": worker.pid, "loaded": int(worker.loaded),
        "running": len(worker.running), "max_seqs": worker.max_seqs, "kv_leases": pool.leases.get(worker.slot, 0),
        "kv_free_list": worker.free, "kv_free_list_misses": worker.misses, "kv_promised": worker.promised,
        "steps": worker.steps, "rows": worker.rows, "busy_us": worker.busy_us,
    }  # fmt: skip
