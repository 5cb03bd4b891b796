"""What the dispatcher counts, in its page of shared memory; common/metrics.py declares it. STATS_REPLY has the KV
pool's numbers too, which its process tells by the same names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibri_protocol.errors import Code, ProtocolError
from colibri_protocol.messages import StatsReply, Usage

from ..common.counters import Counters
from ..common.metrics import FINISHED, PROTOCOL_FAULTS, Kind
from .streams import Stream

if TYPE_CHECKING:
    from .generation import Generations
    from .pool_link import PoolLink
    from .requests import Requests
    from .workers import Worker


class Stats:
    """numbers(): all but histograms, as STATS_REPLY has them."""

    def __init__(self, counters: Counters) -> None:
        """counters: this process's, perhaps with what an earlier one has counted."""
        self.add, self.set, self.get, self.numbers = counters.add, counters.set, counters.get, counters.numbers
        self._histograms = {metric.name: counters.histogram(metric.name) for metric in counters.metrics
                            if metric.kind is Kind.HISTOGRAM and not metric.labels}
        self.first_token = self._histograms["time_to_first_token_seconds"]
        self.between_tokens = self._histograms["inter_token_latency_seconds"]
        self.tokens = counters.total("generation_tokens_total")
        self.token_frames = counters.total("frames_total", direction="out", type="TOKENS")
        self._cancels = {phase: counters.histogram("cancel_latency_seconds", phase=phase)
                         for phase in ("queued", "prefill", "decode")}
        ended = sum(self.get("request_success_total", finished_reason=reason) for reason in FINISHED)
        lost = self.get("requests_started_total") - ended  # with the dispatcher that counted them
        self.add("request_success_total", lost, finished_reason="error")

    def started(self, prompt_tokens: int) -> None:
        self.add("requests_started_total")
        self.add("prompt_tokens_total", prompt_tokens)

    def finished(self, finish: str, error: ProtocolError | None) -> None:
        self.add("request_success_total", finished_reason=finish)
        if error is not None:
            self.add("request_errors_total", code=error.code.name)

    def ended(self, stream: Stream, usage: Usage, now: float) -> None:
        """A request that was live, with what it used. Phases that it did not reach say nothing."""
        seen = {"e2e_request_latency_seconds": now - stream.arrived, "request_prompt_tokens": usage.prompt,
                "request_cached_tokens": usage.cached}  # fmt: skip
        if not stream.is_score:
            seen |= {"request_generation_tokens": usage.generated, "request_params_max_tokens": stream.job.max_tokens}
        if stream.assigned_at:
            seen["request_queue_time_seconds"] = stream.assigned_at - stream.arrived
        if stream.first_at:
            seen |= {"request_prefill_time_seconds": stream.first_at - stream.assigned_at,
                     "request_decode_time_seconds": stream.last_at - stream.first_at,
                     "request_inference_time_seconds": stream.last_at - stream.assigned_at}  # fmt: skip
            if (more := usage.generated - stream.base - 1) > 0:
                seen["request_time_per_output_token_seconds"] = (stream.last_at - stream.first_at) / more
        for name, value in seen.items():
            self._histograms[name].observe(value)
        if stream.cancelled is not None:
            at, phase = stream.cancelled
            self._cancels[phase].observe(now - at)

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


def show(stats: Stats, requests: Requests, generations: Generations, unread: list[int], paused: int) -> None:
    """Sets the gauges. unread: bytes of output waiting per connection; paused: connections whose requests are kept
    back."""
    for name, value in (
        ("num_requests_running", requests.running), ("num_requests_waiting", requests.waiting),
        ("waiting_tokens", requests.waiting_tokens), ("output_buffer_bytes", sum(unread)),
        ("stall_bound_seconds", max((w.stall_ms / 1000 for g in generations for w in g.workers), default=0)),
    ):  # fmt: skip
        stats.set(name, value)
    stats.set("connections", len(unread) - paused, state="active")
    stats.set("connections", paused, state="paused")


def report(stats: Stats, requests: Requests, generations: Generations, connections: int, uptime: float,
           experts: tuple[int, bytes]) -> StatsReply:  # fmt: skip
    """STATS_REPLY, with the gauges as they are shown. experts: of a layer, and the tokens of each; (0, nothing) if that
    was not asked for."""
    pool, (width, tokens) = generations.serving.pool, experts
    return StatsReply(
        uptime_s=uptime, running=requests.running, waiting=requests.waiting, waiting_tokens=requests.waiting_tokens,
        connections=connections, kv_slabs=slabs_by_state(pool), counters=stats.numbers() | pool.counters,
        workers=tuple(per_worker(worker, g.pool) for g in generations for worker in g.workers),
        experts=width, expert_tokens=tokens,
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
