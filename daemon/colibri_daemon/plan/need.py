"""Where memory goes: of the configuration, the model's files and a measured daemon."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from colibri_engine.batch import SCORED_ROWS
from colibri_engine.container import Manifest
from colibri_engine.convert.pipeline import stored_bytes
from colibri_engine.engine import Engine
from colibri_engine.geometry import POLICY, slots

from ..common.arena import choose_slabs
from ..common.facts import ModelFacts
from ..common.kv import MOST_CHUNK, slabs_needed
from ..common.settings import Settings
from ..worker.opening import engine_options

RESERVE = 0.02  # of memory: for the system, its files, and the kernel's free pages
_PAGE, _ENTRY = 4096, 8  # bytes of a page, and of its entry in a page table


@dataclass(frozen=True)
class Need:
    """Bytes, but for the slabs. workspace, output: of one worker. processes: role → measured. kv: of the arena that
    serve would make; most_kv: of the largest for which there is room. request_slabs: of a request of the context."""

    ram: int
    dense: int
    experts: int
    workspace: int
    output: int
    processes: dict[str, int]
    workers: int
    kv: int
    slabs: int
    slab_bytes: int
    request_slabs: int
    refused: str = ""

    @property
    def weights(self) -> int:
        return self.dense + self.experts

    @property
    def private(self) -> int:
        """Of all workers' engines together."""
        return self.workers * (self.workspace + self.output)

    @property
    def overhead(self) -> int:
        return sum(self.processes.values())

    @property
    def page_tables(self) -> int:
        return self.tables(self.kv)

    def tables(self, kv: int) -> int:
        """Each worker maps weights and KV memory in pages of 4 KiB, if there are no huge ones."""
        return self.workers * (self.weights + kv) * _ENTRY // _PAGE

    @property
    def reload(self) -> int:
        """While new workers start beside the old ones, with the same model."""
        return self.private + self.processes.get("worker", 0)

    @property
    def reserve(self) -> int:
        return int(RESERVE * self.ram)

    @property
    def fixed(self) -> int:
        """All but KV memory and its page tables."""
        return self.weights + self.private + self.overhead + self.tables(0) + self.reload + self.reserve

    @property
    def total(self) -> int:
        return self.fixed + self.kv + self.page_tables - self.tables(0)

    @property
    def most_kv(self) -> int:
        """In whole slabs; 0 if there is room for none."""
        room = max(0, self.ram - self.fixed) / (1 + self.workers * _ENTRY / _PAGE)
        return int(room) // self.slab_bytes * self.slab_bytes


def need(settings: Settings, facts: ModelFacts, ram: int, context: int, threads: int,
         processes: dict[str, int]) -> Need:
    """ram: bytes the daemon may take. threads: of a worker."""
    dense, experts = (size for _, size in Manifest.load(Path(facts.folder)).files)
    slabs, refused = 0, ""
    try:
        slabs = choose_slabs(settings, facts, ram)
    except ValueError as e:
        refused = str(e)
    with Engine.open(facts.folder, threads, **engine_options(settings, facts)) as engine:
        workspace = engine.runtime.scratch_bytes
    return Need(
        ram=ram, dense=dense, experts=experts, workspace=workspace,
        output=4 * facts.vocab_size * (settings.max_seqs + SCORED_ROWS), processes=processes,
        workers=settings.workers, kv=slabs * facts.slab_bytes, slabs=slabs, slab_bytes=facts.slab_bytes,
        request_slabs=slabs_needed(context, facts.pinned, facts.window, settings.step_tokens or MOST_CHUNK,
                                   facts.slab_tokens),
        refused=refused,
    )  # fmt: skip


def bytes_as(format: str, manifest: Manifest) -> int:
    """Of the model's weights in another format."""
    return sum(stored_bytes(s, POLICY[format][s.group]) for s in slots(manifest.architecture, manifest.geometry))
