"""Every metric of the daemon: name, kind, meaning, labels with all their values, buckets, and who writes it.

Adding one is an entry here and the call that counts: the layout of the shared pages (counters.py), the exposition, the
documentation (METRICS.md), what dashboards and alerts may name all follow. Names are vLLM's where vLLM has the metric.

No label takes a value that a client chooses. ``worker`` is a slot, never a pid, so that the number of series does not
grow as processes come and go; ``model_name`` is the name of the model that serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from colibri_protocol import messages  # noqa: F401 - declares all messages
from colibri_protocol.errors import Code
from colibri_protocol.message import BOTH, CLIENT, SERVER, messages_by_tag

from .declaration import SETTINGS

PREFIX = "colibri_"
FINISHED = ("stop", "length", "abort", "deadline", "error")
PROTOCOL_FAULTS = {
    Code.PROTOCOL: "decode", Code.VERSION: "version", Code.FRAME_TOO_LARGE: "length", Code.READ_TIMEOUT: "timeout",
}  # fmt: skip
REJECTIONS = ("queue_full", "queue_tokens", "peer_limit", "never_fits", "draining", "not_ready", "poisoned", "invalid")
STATES = ("starting", "ready", "degraded", "draining", "failed")  # of the service, as HEALTH_REPLY says them
SLAB_STATES = ("live", "cached", "free", "quarantined", "withheld")
CAUSES = ("fault", "exit", "hang", "killed", "boot")

TTFT = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
ITL = (.005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LONG = (.005, .01, .025, .05, .1, .2, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
        1920, 7680)
SHORT = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, .01, .025, .05, .1, .25, 1)
STEP = (.001, .0025, .005, .01, .025, .05, .1, .15, .2, .3, .5, 1, 2.5, 5, 10)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LIFE = (.1, 1, 5, 15, 60, 300, 900, 3600, 14400, 86400)


class Source(Enum):
    """Where the numbers of a metric stand. The values are permanent: pages carry them."""

    DISPATCHER = 1
    KVPOOL = 2
    WORKER = 3  # in each worker's own page
    SUPERVISOR = 4
    SLOT = 5  # the supervisor's page about a worker slot
    METRICS = 6  # in no page: made when it is asked for, by the metrics process


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """labels: names; series: the values that they take together. worker: there is one series for each worker slot,
    else pages of one source are added up (combine "max": the largest). info: a gauge that is 1, whose labels say
    something; their values are known when it is asked for."""

    name: str
    kind: Kind
    help: str
    source: Source = Source.METRICS
    labels: tuple[str, ...] = ()
    series: tuple[tuple[str, ...], ...] = ((),)
    buckets: tuple[float, ...] = ()
    model: bool = False
    worker: bool = False
    info: bool = False
    combine: str = "sum"

    @property
    def full_name(self) -> str:
        """process_*: names that every exporter uses."""
        return self.name if self.name.startswith("process_") else PREFIX + self.name

    @property
    def words(self) -> int:
        """Numbers in a page for one series: a histogram's buckets, the one without an end included, and their sum."""
        return len(self.buckets) + 2 if self.buckets else 1

    @property
    def label_names(self) -> tuple[str, ...]:
        """As exported."""
        return (*["model_name"] * self.model, *["worker"] * self.worker, *self.labels)

    def keys(self) -> Iterator[str]:
        """The series as STATS_REPLY names them, without labels that a page does not know."""
        return (key(self.name, dict(zip(self.labels, values, strict=True))) for values in self.series)


def key(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{inside}}}" if labels else name


def _counter(name: str, help: str, label: str = "", values: tuple[str, ...] = (), **more: Any) -> Metric:
    return _labelled(Metric(name, Kind.COUNTER, help, **more), label, values)


def _gauge(name: str, help: str, label: str = "", values: tuple[str, ...] = (), **more: Any) -> Metric:
    return _labelled(Metric(name, Kind.GAUGE, help, **more), label, values)


def _histogram(name: str, buckets: tuple[float, ...], help: str, label: str = "", values: tuple[str, ...] = (),
               **more: Any) -> Metric:
    return _labelled(Metric(name, Kind.HISTOGRAM, help, buckets=buckets, **more), label, values)


def _labelled(metric: Metric, label: str, values: tuple[str, ...]) -> Metric:
    return replace(metric, labels=(label,), series=tuple((value,) for value in values)) if label else metric


def _info(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, help, labels=labels, info=True)


def _by(source: Source, *metrics: Metric) -> tuple[Metric, ...]:
    return tuple(replace(metric, source=source) for metric in metrics)


def _frames() -> Metric:
    """Each type only in the directions in which it travels."""
    ways = [(way, kind.NAME) for kind in messages_by_tag() for way, senders in
            (("in", (CLIENT, BOTH)), ("out", (SERVER, BOTH))) if kind.SENDER in senders]
    return Metric("frames_total", Kind.COUNTER, "Messages of clients (in) and to them (out).",
                  labels=("direction", "type"), series=tuple(ways))


# fmt: off
METRICS: tuple[Metric, ...] = (
    # ---- requests ----
    *_by(Source.DISPATCHER,
        _counter("requests_started_total", "Requests accepted; those finished and those live add up to it.",
                 model=True),
        _counter("request_success_total", "Requests that ended, by how; those that a dispatcher took with it when it "
                 "was killed are errors.", "finished_reason", FINISHED),
        _counter("request_errors_total", "ERROR messages sent.", "code", tuple(code.name for code in Code)),
        _counter("admission_rejections_total", "Requests not accepted.", "reason", REJECTIONS),
        _counter("prompt_tokens_total", "Prompt tokens of accepted requests.", model=True),
        _counter("generation_tokens_total", "Tokens that workers delivered.", model=True),
        _counter("request_takeovers_total", "Requests that moved off a lost worker."),
        _counter("poison_requests_total", "Requests that were proven to end their workers."),
        _counter("num_preemptions_total", "Times that a request gave way to others and waited again.", model=True),
        _gauge("num_requests_running", "Requests in workers.", model=True),
        _gauge("num_requests_waiting", "Requests in the queue.", model=True),
        _gauge("waiting_tokens", "Tokens that they have to compute first.", model=True),
        _histogram("time_to_first_token_seconds", TTFT, "From the arrival of a request to its first token.",
                   model=True),
        _histogram("inter_token_latency_seconds", ITL, "Between two deliveries of tokens of a request, which are "
                   "mostly one token.", model=True),
        _histogram("request_time_per_output_token_seconds", ITL, "Mean time between the tokens of an ended request, "
                   "the first one aside.", model=True),
        _histogram("e2e_request_latency_seconds", LONG, "From the arrival of a request to its end.", model=True),
        _histogram("request_queue_time_seconds", LONG, "From the arrival of a request to its first worker.",
                   model=True),
        _histogram("request_prefill_time_seconds", LONG, "From there to its first token.", model=True),
        _histogram("request_decode_time_seconds", LONG, "From there to its last token.", model=True),
        _histogram("request_inference_time_seconds", LONG, "From its first worker to its last token.", model=True),
        _histogram("request_prompt_tokens", TOKENS, "Prompt tokens of ended requests.", model=True),
        _histogram("request_generation_tokens", TOKENS, "Output tokens of ended requests.", model=True),
        _histogram("request_params_max_tokens", TOKENS, "Output tokens that ended requests were allowed.", model=True),
        _histogram("request_cached_tokens", TOKENS, "Prompt tokens of ended requests that were in the prefix cache.",
                   model=True),
        _histogram("cancel_latency_seconds", SHORT, "From a cancel or the loss of the client to the request's end, by "
                   "what it was doing.", "phase", ("queued", "prefill", "decode")),
        _gauge("stall_bound_seconds", "Longest time that a step is meant to take, of all workers; 0: not known.",
               combine="max"),
    ),
    # ---- clients ----
    *_by(Source.DISPATCHER,
        _gauge("connections", "Open now.", "state", ("active", "paused")),
        _counter("connections_total", "Connections by what became of them.", "result",
                 ("accepted", "refused_limit", "refused_auth", "emfile")),
        _frames(),
        _counter("protocol_errors_total", "Connections that broke the protocol.", "kind",
                 tuple(PROTOCOL_FAULTS.values())),
        _counter("slow_reader_disconnects_total", "Connections closed because they did not read."),
        _gauge("output_buffer_bytes", "Output that clients have not read yet."),
    ),
    # ---- KV cache ----
    *_by(Source.KVPOOL,
        _gauge("kv_slabs", "Slabs by state. live: a worker's own or some request's; withheld: without memory.", "state",
               SLAB_STATES),
        _counter("prefix_cache_queries_total", "Tokens of requests that may use the prefix cache.", model=True),
        _counter("prefix_cache_hits_total", "Of these, tokens that were found there.", model=True),
        _counter("prefix_cache_rejects_total", "Prefixes that were not used. token_mismatch: equal hash, other "
                 "content; stale: behind something forgotten; hole: something in view before it is gone.", "reason",
                 ("token_mismatch", "stale", "hole")),
        _counter("kv_evictions_total", "Slabs taken away. window: out of a running request's view; admin: dropped by "
                 "an administrator; retire: the cache was replaced; else the policy, for somebody who needed it.",
                 "reason", ("window", "admin", "retire", *SETTINGS["kv_eviction"].choices)),
        _counter("kv_leases_reclaimed_total", "Slabs taken back from what did not give them back.", "reason",
                 ("worker_death", "abort")),
        _counter("kv_quarantined_total", "Slabs whose contents did not match their checksum."),
        _counter("kv_invariant_violations_total", "Faults in the accounting of slabs. peer: a process said what a "
                 "right one never says.", "kind", ("peer",)),
        _histogram("kv_call_duration_seconds", SHORT, "Time that the KV pool takes to handle a message.", "op",
                   ("alloc", "attach", "commit", "release", "lookup")),
        _histogram("kv_block_lifetime_seconds", LIFE, "From a slab's commit to its eviction."),
        _histogram("kv_block_idle_before_evict_seconds", LIFE, "From a slab's last use to its eviction."),
        _histogram("kv_block_reuse_gap_seconds", LIFE, "From a slab's last use to the next one, out of the cache."),
    ),
    _gauge("kv_cache_usage_perc", "Share of the KV cache that is live, 0 to 1.", model=True),
    _info("cache_config_info", "Geometry of the KV cache. num_gpu_blocks: num_slabs, by the name that vLLM's "
          "dashboards know.", "block_size", "num_gpu_blocks", "num_slabs", "pinned_tokens", "window_tokens"),
    # ---- workers ----
    *_by(Source.WORKER,
        _gauge("worker_requests_running", "Requests that the worker has.", worker=True),
        _gauge("kv_leases", "Slabs that only this worker may use.", worker=True),
        _counter("worker_steps_total", "Engine steps.", worker=True),
        _counter("worker_rows_total", "Tokens computed.", worker=True),
        _counter("worker_busy_seconds_total", "Time spent in steps.", worker=True),
        _counter("kv_free_list_misses_total", "Decode rows that sat a step out for want of a slab."),
        _histogram("iteration_tokens", ROWS, "Tokens computed in a step.", model=True),
        _histogram("step_duration_seconds", STEP, "Duration of engine steps by what they computed.", "kind",
                   ("prefill", "decode", "mixed")),
        _histogram("decode_stall_seconds", STEP, "Longest step that running requests had to wait for a prompt, for "
                   "each prompt.", model=True),
        _counter("expert_tokens_total", "Tokens times experts that each was routed to, over all layers."),
    ),
    *_by(Source.SLOT,
        _counter("worker_restarts_total", "Worker processes that ended without being asked to. fault: by a signal of "
                 "its own doing; exit: its own exit code; killed: from outside, out of memory included; boot: before "
                 "it was ready.", "reason", CAUSES, worker=True),
    ),
    *_by(Source.SUPERVISOR,
        _counter("child_restarts_total", "Other processes that ended without being asked to.", "process",
                 ("dispatcher", "kvpool", "metrics")),
        _gauge("weights_load_seconds", "Time that the last worker to start took to be ready."),
    ),
    _gauge("worker_up", "1: the worker is ready and makes progress.", worker=True),
    _gauge("worker_progress_timestamp_seconds", "When the worker last made progress; 0: it does not run.", worker=True),
    _gauge("worker_resident_memory_bytes", "Resident memory, what is shared with others included.", worker=True),
    _counter("worker_cpu_seconds_total", "CPU time of the worker's present process.", worker=True),
    _gauge("expert_load_imbalance_ratio", "Tokens of a layer's busiest expert over the mean of its experts, in the "
           "last minute: 1 is even. worst: of all layers; mean: over all layers. 0: nothing was routed.", "layers",
           ("worst", "mean")),
    # ---- the service ----
    _gauge("state", "1 for the state that the service is in.", "state", STATES),
    _gauge("ready", "1: new requests are served."),
    _gauge("config_last_reload_success", "1: the last reload went well, or there was none."),
    _gauge("config_last_reload_success_timestamp_seconds", "When a reload, or the start, last went well."),
    _info("build_info", "What runs.", "version", "isa", "protocol"),
    # ---- the supervisor's process ----
    _counter("process_cpu_seconds_total", "CPU time of the supervisor."),
    _gauge("process_resident_memory_bytes", "Resident memory of the supervisor."),
    _gauge("process_virtual_memory_bytes", "Virtual memory of the supervisor."),
    _gauge("process_start_time_seconds", "When the supervisor was started."),
    _gauge("process_open_fds", "Open descriptors of the supervisor."),
    _gauge("process_max_fds", "Most descriptors that it may open."),
)
# fmt: on

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
