"""The figures of a plan, each with where it comes from: for a terminal and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from colibri_engine.bench.ceiling import Model
from colibri_engine.container import Manifest
from colibri_engine.convert.progress import human

from ..common.facts import ModelFacts
from ..common.settings import Settings
from .need import RESERVE, Need
from .probe import Probed
from .speed import Steps, distinct_experts, first_tokens

_ENGINE_CHUNK = 512  # tokens of a step of colibri-bench


@dataclass(frozen=True)
class Figure:
    """key: in JSON. value in unit, which is what report.py knows to print."""

    key: str
    label: str
    value: float
    unit: str
    formula: str

    @property
    def shown(self) -> str:
        match self.unit:
            case "bytes":
                return human(self.value)
            case "bytes/s" | "ops/s":
                return f"{self.value / 1e9:.1f} G{self.unit[0].upper() if self.unit == 'bytes/s' else 'OP'}/s"
            case "s":
                return f"{self.value:.2f} s" if self.value >= 1 else f"{1000 * self.value:.1f} ms"
            case "tokens/s":
                return f"{self.value:.0f} tok/s" if self.value >= 100 else f"{self.value:.1f} tok/s"
            case _:
                return f"{self.value:.1f} {self.unit}" if self.value % 1 else f"{self.value:.0f} {self.unit}"

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "unit": self.unit, "formula": self.formula}


@dataclass(frozen=True)
class Load:
    """What is planned for. running: of the clients, at once. threads: of a worker."""

    clients: int
    context: int
    running: int
    workers: int
    threads: int

    @property
    def streams(self) -> int:
        """Of the worker that has most."""
        return max(1, -(-self.running // self.workers))


def memory(n: Need, settings: Settings) -> Iterator[Figure]:
    def row(key: str, label: str, value: float, formula: str) -> Figure:
        return Figure(key, label, value, "bytes", formula)

    yield row("ram", "memory", n.ram, "--ram, or what is available here within the cgroup's limit")
    yield row("weights_dense", "weights, dense", n.dense, "size of dense.bin; mapped, shared by all workers")
    yield row("weights_experts", "weights, experts", n.experts, "size of experts.bin; mapped, shared by all workers")
    chosen = ("kv_bytes, in whole slabs" if settings.kv_bytes else
              "kv_bytes 0: half of memory - weights, at most what workers x max_seqs full requests need")
    yield row("kv", "KV arena", n.kv, f"{chosen}; {n.slabs} slabs x {n.slab_bytes} bytes")
    yield row("workspace", "engine scratch of a worker", n.workspace,
              "model view + workspace + sampler, as the engine says for these limits; touched as far as steps need it")
    yield row("output", "logits of a worker", n.output, "4 bytes x vocabulary x (max_seqs + 32 scored rows)")
    measured = ", ".join(f"{role} {human(size)}" for role, size in n.processes.items())
    yield row("processes", "Python and processes", n.overhead,
              f"measured on a daemon with a tiny model, proportional resident sizes: {measured}")
    yield row("page_tables", "page tables", n.page_tables, "workers x 8 bytes per page of 4 KiB of weights and KV")
    yield row("reload", "reload, while it lasts", n.reload, "workers x (scratch + logits) + worker processes, again")
    yield row("reserve", "page cache and system", n.reserve, f"{RESERVE:.0%} of memory")
    yield row("total", "sum", n.total, "of all but memory; scratch and logits once per worker")
    yield row("most_kv", "KV arena, at most", n.most_kv, "memory - all else, in whole slabs: the largest kv_bytes")


def requests(n: Need, facts: ModelFacts, load: Load, settings: Settings) -> Iterator[Figure]:
    seen = f"pinned {facts.pinned} + window {facts.window} + a chunk" if facts.window else "window 0 sees it all"
    yield Figure("slabs_per_request", f"a request of {load.context} tokens", n.request_slabs, "slabs",
                 f"ceil({load.context} / {facts.slab_tokens}), at most those of {seen}")  # fmt: skip
    yield Figure("fit_kv", "of them in KV memory", n.slabs // n.request_slabs, "requests",
                 f"{n.slabs} slabs / {n.request_slabs}; shared prefixes make it more")  # fmt: skip
    places = settings.max_seqs * settings.workers
    yield Figure("places", "places in the batches", places, "requests",
                 f"workers {settings.workers} x max_seqs {settings.max_seqs}")  # fmt: skip
    yield Figure("running", "clients served at once", load.running, "requests", "min(clients, fit, places)")


class Speeds:
    """Rates and latencies of a load."""

    def __init__(self, facts: ModelFacts, manifest: Manifest, load: Load, probed: Probed, depth: int,
                 settings: Settings) -> None:
        self._facts, self._load, self._depth, self._geometry = facts, load, depth, manifest.geometry
        self._settings, self._probed = settings, probed
        self._steps = Steps(probed, load.streams, depth)
        self._least = Model(manifest, facts.slab_bytes / facts.slab_tokens)

    def figures(self) -> Iterator[Figure]:
        yield from self._machine()
        yield from self._prefill()
        yield from self._decode("decode_1", 1, 1)
        if self._load.running > 1:
            yield from self._decode("decode_n", self._load.running, self._load.streams)
        yield from self._first_tokens()

    def _machine(self) -> Iterator[Figure]:
        c, p, load = self._probed.ceilings, self._probed, self._load
        of = f"measured, one worker of {load.workers} at the same time, {load.threads} threads, {c.isa}"
        yield Figure("read", "memory read", c.read, "bytes/s", of)
        yield Figure("int8", "int8 arithmetic", c.int8, "ops/s", of)
        yield Figure("f32", "float arithmetic", c.f32, "ops/s", of)
        yield Figure("layers_timed", "layers timed", p.layers, f"of {p.of}", "so many that the caches cannot hold them")

    def _experts(self, rows: int) -> float:
        return distinct_experts(self._geometry.experts, self._geometry.top_k, rows)

    def _ceiling(self, tokens: int, heads: int, keys: int) -> float:
        """Seconds of one step at least."""
        experts = self._geometry.layers * self._experts(tokens)
        return self._least.work(tokens, heads, 1, experts, keys).seconds(self._probed.ceilings)

    def _prefill(self) -> Iterator[Figure]:
        prompt = self._load.context
        chunks = [(min(_ENGINE_CHUNK, prompt - at), min(at, self._depth), int(at + _ENGINE_CHUNK >= prompt))
                  for at in range(0, prompt, _ENGINE_CHUNK)]  # rows, keys before them, texts that draw
        took = sum(self._steps.prefill(rows, keys, draws) for rows, keys, draws in chunks)
        least = sum(self._ceiling(rows, draws, keys + rows) for rows, keys, draws in chunks)
        yield Figure("prefill", "prefill, engine alone", prompt / took, "tokens/s",
                     f"{prompt} / sum of steps of {_ENGINE_CHUNK} rows: layers / timed x (body + attention) + head")
        yield Figure("prefill_ceiling", "  its ceiling", prompt / least, "tokens/s",
                     "max(bytes / read, int8 / int8 rate + float / float rate) for each step")  # fmt: skip

    def _decode(self, key: str, running: int, streams: int) -> Iterator[Figure]:
        keys, workers = self._depth, min(running, self._load.workers)
        seconds, hit = self._steps.decode(streams, keys), self._experts(streams)
        what = f"decode, {running} {'stream' if running == 1 else 'streams'}"
        yield Figure(key, what, running / seconds, "tokens/s",
                     f"streams / step; step = layers / timed x (body({streams}) + {streams} x {keys} keys) + head")
        yield Figure(f"{key}_step", "  a step", seconds, "s",
                     f"{streams} rows hit E (1 - (1 - k/E)^n) = {hit:.1f} of {self._geometry.experts} experts a layer")
        least = self._ceiling(streams, streams, streams * keys)
        kv = human(streams * keys * self._facts.slab_bytes / self._facts.slab_tokens)
        yield Figure(f"{key}_ceiling", "  its ceiling", workers * streams / least, "tokens/s",
                     f"as above; {kv} of keys and values a step")  # fmt: skip

    def _first_tokens(self) -> Iterator[Figure]:
        facts, settings, load = self._facts, self._settings, self._load
        found = self._steps.calibration(facts, self._depth, settings.step_tokens)
        yield Figure("chunk", "prefill chunk", found.chunk, "rows",
                     "step_tokens" if settings.step_tokens else "as a worker chooses it: no step over stall")
        yield Figure("stall", "stall bound", found.stall, "s", "max(100 ms, one pass over the weights + the chunk)")

        def wait(texts: int) -> float:
            return first_tokens(self._steps, facts, found, load.context, texts, settings)[-1]

        alone = wait(1)
        yield Figure("ttft_1", f"TTFT, prompt of {load.context}", alone, "s",
                     "sum of its steps, played through with the worker's scheduler")  # fmt: skip
        yield Figure("prefill_served", "  prefill in the daemon", load.context / alone, "tokens/s", "prompt / TTFT")
        if load.streams > 1:
            yield Figure("ttft_n", f"TTFT, last of {load.running} at once", wait(load.streams), "s",
                         f"the same with {load.streams} prompts in a worker, none cached")  # fmt: skip


def finite(figures: list[Figure]) -> dict[str, Any]:
    return {f.key: f.to_json() for f in figures if math.isfinite(f.value)}
