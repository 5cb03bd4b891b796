"""An open model: mapped files, threads, scratch memory, and one forward step. Engine and Batch run on it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import binding
from ._colibri import ffi, lib
from .binding import Buffer, check, choice, new
from .callbacks import Callbacks, Monitor
from .errors import EngineError

MAX_CONTEXT = 131072
UNQUANTISED = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Info:
    """Geometry and sizes of an open model (colibri_model_info_t)."""

    architecture: str
    isa: str
    numerics_class: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    experts: int
    top_k: int
    context: int
    pinned: int
    window: int
    slab_tokens: int
    slab_bytes: int
    weight_bytes: int
    expert_bytes: int


@dataclass(frozen=True)
class Options:
    """How a model is opened; Engine.__init__ explains each."""

    threads: int = 1
    isa: str | None = None
    kv_format: str | None = None
    slab_tokens: int = 64
    max_tokens: int = 256
    max_sequences: int = 64
    max_context: int = MAX_CONTEXT
    populate: bool = False
    routing: str = "float"
    progress: bool | memoryview = False
    expert_tokens: bool | memoryview = False
    files: Mapping[str, int] | None = None
    fault_exit: int | None = None


_TEXTS = {"architecture": "architecture", "isa": "isa_name", "numerics_class": "numerics_class"}


def _read_info(model: Any) -> Info:
    raw = new("colibri_model_info_t")
    lib.colibri_describe(model, raw)
    texts = {name: ffi.string(getattr(raw, field)).decode() for name, field in _TEXTS.items()}
    numbers = {name: int(getattr(raw, name)) for name in Info.__dataclass_fields__ if name not in texts}
    return Info(**texts, **numbers)


def own_kv_format(quantization: str | None) -> str:
    """Keys and values as precise as the weights: rounding them to f16 would be the largest error there is."""
    return "f32" if quantization in UNQUANTISED else "f16"


class Runtime:
    """Owns what an open model needs. close() releases it; using it afterwards is an EngineError."""

    def __init__(self, path: Path | str, options: Options, callbacks: Callbacks | None) -> None:
        if options.threads < 1:
            raise ValueError(f"threads is {options.threads}; it must be at least 1")
        self.path = Path(path)
        self._pool, self._handle, self._host = ffi.NULL, ffi.NULL, None
        self.err = new("colibri_error_t")
        self._callbacks = callbacks or Callbacks()
        self._host = self._map(options)
        try:
            self._watch(options.fault_exit)
            self.config = self._configure(options)
            self._callbacks.install(self.config)
            grid = None if options.expert_tokens is False else self._expert_grid()
            self.monitor = Monitor(self.config, options.progress, options.expert_tokens, grid)
            self._init()
            self.routing = self._build_routing(choice({"float": 0, "int8": 1}, options.routing, "routing"))
        except EngineError as e:
            self.close()
            raise self._with_path(e) from None
        except BaseException:
            self.close()
            raise

    def _map(self, options: Options) -> Any:
        """The model's files in memory."""
        host = ffi.new("colibri_host_model_t *")
        populate = lib.COLIBRI_MAP_POPULATE if options.populate else 0
        flags = lib.COLIBRI_MAP_HUGEPAGE | lib.COLIBRI_MAP_DONTDUMP | populate
        folder = os.fsencode(self.path)
        if options.files is None:
            check(lib.colibri_host_load(folder, flags, host, self.err), self.err)
            return host
        names = {ffi.new("char[]", os.fsencode(name)): fd for name, fd in options.files.items()}
        opened = ffi.new("colibri_host_file_t[]", [(name, fd, 0) for name, fd in names.items()])
        check(lib.colibri_host_load_opened(folder, opened, len(opened), flags, host, self.err), self.err)
        return host

    def _watch(self, exit_code: int | None) -> None:
        for mapped in self._host.maps if exit_code is not None else ():
            if mapped.data:
                check(lib.colibri_fault_watch(mapped.data, mapped.size, exit_code, self.err), self.err)

    def _unmap(self) -> None:
        if self._host is not None:
            for mapped in self._host.maps:
                lib.colibri_fault_forget(mapped.data)
            lib.colibri_host_unload(self._host, self.err)
            self._host = None

    def _manifest(self) -> dict[str, Any]:
        try:
            return json.loads(bytes(ffi.buffer(self._host.manifest, self._host.manifest_size)))
        except (ValueError, RecursionError):
            raise EngineError(lib.COLIBRI_MANIFEST, "is not well-formed JSON") from None

    def _with_path(self, e: EngineError) -> EngineError:
        """What the library found in a manifest, with the manifest's name."""
        if e.status not in (lib.COLIBRI_MANIFEST, lib.COLIBRI_TENSOR, lib.COLIBRI_UNSUPPORTED):
            return e
        return EngineError(e.status, f"{self.path}/manifest.json: {e}")

    def _expert_grid(self) -> tuple[int, int]:
        check(lib.colibri_init_size(self.config, ffi.new("uint64_t *"), self.err), self.err)  # geometry is possible
        geometry = self._manifest()["geometry"]
        return geometry["layers"], geometry["experts"]

    def _configure(self, options: Options) -> Any:
        level = ffi.new("uint32_t *")
        if options.isa is None:
            check(lib.colibri_host_isa(level, self.err), self.err)
        else:
            level[0] = choice(binding.ISA_NAMES, options.isa, "isa")
        kv_format = options.kv_format or own_kv_format(self._manifest().get("quantization"))
        config = new("colibri_config_t", manifest=self._host.manifest, manifest_size=self._host.manifest_size,
                     weights=self._host.weights, n_weights=self._host.n_weights, isa=level[0], threads=options.threads,
                     max_tokens=options.max_tokens, max_sequences=options.max_sequences,
                     max_context=options.max_context, slab_tokens=options.slab_tokens,
                     kv_format=choice(binding.KV_FORMATS, kv_format, "kv_format"))
        if options.threads > 1:
            self._start_pool(config, options.threads)
        return config

    def _start_pool(self, config: Any, threads: int) -> None:
        pool = ffi.new("colibri_pool_t **")
        if code := lib.colibri_pool_create(threads, 0, pool):
            raise OSError(code, f"cannot start {threads} engine threads")
        self._pool = pool[0]
        config.parallel_for = ffi.addressof(lib, "colibri_pool_run")
        config.parallel_ctx = self._pool

    def _init(self) -> None:
        size = ffi.new("uint64_t *")
        check(lib.colibri_init_size(self.config, size, self.err), self.err)
        self._view = Buffer(lib.COLIBRI_WORKSPACE, size[0])
        self.config.view = self._view.c
        model = ffi.new("colibri_model_t **")
        check(lib.colibri_init(self.config, model, self.err), self.err)
        self._handle = model[0]
        self._callbacks.raise_failure()
        self.info = _read_info(self.model)
        lib.colibri_workspace_size(self.model, size)
        self.workspace = Buffer(lib.COLIBRI_WORKSPACE, size[0])
        lib.colibri_sample_size(self.model, size)
        self.scratch = Buffer(lib.COLIBRI_WORKSPACE, size[0] * self.config.threads)

    def _build_routing(self, wanted: int) -> Buffer | None:
        if not wanted:
            return None
        size = ffi.new("uint64_t *")
        if lib.colibri_routing_size(self.model, size) != lib.COLIBRI_OK:
            raise ValueError("routing is 'int8' but the model has no router")
        table = Buffer(lib.COLIBRI_ROUTING_TABLE, size[0])
        check(lib.colibri_routing_build(self.model, table.c, self.err), self.err)
        return table

    def close(self) -> None:
        """Releases the model. Idempotent."""
        lib.colibri_unload(self._handle)
        lib.colibri_pool_destroy(self._pool)
        self._handle, self._pool = ffi.NULL, ffi.NULL
        self._unmap()

    @property
    def model(self) -> Any:
        """The open handle."""
        if not self._handle:
            raise EngineError(lib.COLIBRI_INVALID_ARGUMENT, f"{self.path}: the engine is closed; open it again")
        return self._handle

    @property
    def scratch_bytes(self) -> int:
        """Memory of its own, at most: model view, workspace of a step, scratch of the sampler's threads."""
        return self._view.size + self.workspace.size + self.scratch.size

    # ---- one step ----

    def batch(self, kv: Buffer, output: Buffer) -> Any:
        """A colibri_batch_t without sequences, with this model's scratch memory. The caller keeps the buffers."""
        return new("colibri_batch_t", kv=kv.c, workspace=self.workspace.c, output=output.c,
                   routing_table=self.routing.c if self.routing else ffi.NULL)

    def forward(self, batch: Any) -> None:
        """One colibri_forward. A sequence that overflowed says so in its status and is no error here; everything else
        is an EngineError, or a callback's own exception."""
        status = lib.colibri_forward(self.model, batch, self.err)
        self._callbacks.raise_failure()
        if status == lib.COLIBRI_CANCELLED:
            self.monitor.clear()
        check(status, self.err)
