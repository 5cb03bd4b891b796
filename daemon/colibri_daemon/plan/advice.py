"""What of a plan does not fit, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from colibri_engine.container import Manifest
from colibri_engine.convert.progress import human

from ..common.facts import ModelFacts
from ..common.settings import Settings
from ..common.values import format_size
from .figures import Load
from .need import Need, bytes_as


class Problem(NamedTuple):
    what: str
    remedy: str


def problems(n: Need, facts: ModelFacts, load: Load, settings: Settings) -> Iterator[Problem]:
    """Most important first."""
    one = n.request_slabs * n.slab_bytes
    if n.most_kv < one:
        yield Problem(f"weights, processes and one request of {load.context} tokens take {human(n.fixed + one)}, "
                      f"there are {human(n.ram)}", _smaller(n, facts, one))  # fmt: skip
    elif n.refused:
        yield Problem(n.refused, f"kv_bytes between {format_size(one)} and {format_size(n.most_kv)}")
    elif n.total > n.ram:
        yield Problem(f"the sum is {human(n.total)}, there are {human(n.ram)}",
                      f"lower kv_bytes to {format_size(n.most_kv)} or less")  # fmt: skip
    if load.context > facts.max_len:
        yield Problem(f"{load.context} tokens are more than a request may have, {facts.max_len}", _longer(facts))
    yield from _clients(n, facts, load, settings)


def _smaller(n: Need, facts: ModelFacts, one: int) -> str:
    sizes = {fmt: bytes_as(fmt, Manifest.load(Path(facts.folder))) for fmt in ("q8", "q4")}
    less = [f"{fmt} weights ({human(size)} instead of {human(n.weights)})" for fmt, size in sizes.items()
            if size < 0.95 * n.weights]  # fmt: skip
    return ", or ".join([f"at least {human(n.fixed + one)} of memory", *less])


def _longer(facts: ModelFacts) -> str:
    if facts.window:
        return "raise max_tokens_total"
    return f"the model was trained for {facts.context}: set window, so that a text may go on, or ask for less"


def _clients(n: Need, facts: ModelFacts, load: Load, settings: Settings) -> Iterator[Problem]:
    places, fit = settings.max_seqs * settings.workers, n.slabs // n.request_slabs
    if load.clients > places:
        yield Problem(f"{load.clients - places} of {load.clients} clients wait: there are {places} places",
                      f"raise max_seqs to {-(-load.clients // settings.workers)} or more")  # fmt: skip
    if load.clients > fit and n.most_kv >= n.request_slabs * n.slab_bytes:
        wanted = load.clients * n.request_slabs * n.slab_bytes
        could = n.most_kv // n.slab_bytes // n.request_slabs
        remedy = f"kv_bytes = {format_size(wanted)}" if wanted <= n.most_kv else (
            f"kv_bytes = {format_size(n.most_kv)} is the most there is room for, {could} of them; "
            f"{human(wanted - n.most_kv)} more memory, or shorter contexts{_window(facts)}")  # fmt: skip
        yield Problem(f"{load.clients} requests of {load.context} tokens need {human(wanted)} of KV memory; "
                      f"{fit} fit, the others wait or are preempted", remedy)  # fmt: skip


def _window(facts: ModelFacts) -> str:
    return "" if facts.window else ", or a window"
