"""Checking a model before anything depends on it, in a short-lived child of the supervisor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colibri_engine import Engine, selftest
from colibri_engine.container import MANIFEST, Manifest
from colibri_engine.errors import ContainerError, EngineError
from colibri_engine.files import RegularFile, read_json
from colibri_engine.geometry import Geometry, default_attention
from colibri_engine.runtime import Info, own_kv_format
from colibri_engine.verify import structure
from colibri_protocol.limits import MAX_STOP_IDS

from ..common.facts import FileFacts, ModelFacts
from ..common.settings import Settings

_EOS_FILES = ("generation_config.json", "config.json")  # the first that has the field counts


def check(settings: Settings) -> ModelFacts:
    """The model's facts, configuration applied. ColibriError, OSError or ValueError with what is wrong and, where
    settings are at fault, which. Reads no weights."""
    folder = Path(settings.model or "").resolve()
    files = [_file(folder, MANIFEST)] if folder.is_dir() else []  # before it is read
    manifest = Manifest.load(folder)
    files += [_file(folder, name) for name, _ in manifest.files]
    for finding in structure(folder, manifest):
        raise ContainerError(finding.path, finding.reason, finding.item)
    pinned, window = attention(settings, manifest.geometry)
    kv_format = own_kv_format(manifest.quantization) if settings.kv_format == "auto" else settings.kv_format
    info = _open(folder, kv_format, settings.slab_tokens)
    return ModelFacts(
        folder=str(folder), name=manifest.name, id=manifest.model_id, fingerprint=_fingerprint(info.isa),
        architecture=manifest.architecture, quantization=manifest.quantization, vocab_size=info.vocab,
        context=info.context, max_len=_max_len(settings, window, info.context),
        eos_ids=eos_ids(folder, info.vocab), pinned=pinned, window=window, positions=settings.positions,
        kv_format=kv_format, slab_tokens=settings.slab_tokens, slab_bytes=info.slab_bytes,
        weight_bytes=info.weight_bytes, files=tuple(files), layers=info.layers, experts=info.experts,
    )  # fmt: skip


def _file(folder: Path, name: str) -> FileFacts:
    with RegularFile(folder / name, ContainerError) as file:
        return FileFacts.of(name, file.fd)


def attention(settings: Settings, geometry: Geometry) -> tuple[int, int]:
    """(pinned, window) as configured, the model's defaults where nothing is."""
    pinned, window = default_attention(geometry)
    if settings.window is not None:
        window = settings.window
        pinned = min(pinned, max(0, geometry.context - window)) if window else 0
    if settings.pinned is not None:
        pinned = settings.pinned
        if settings.window is None:
            window = min(window, max(1, geometry.context - pinned))
    if pinned and not window:
        raise ValueError(f"pinned is {pinned} and window 0, which sees everything: set window, or pinned to 0")
    if pinned and settings.positions == "cache" and pinned + window > geometry.context:
        raise ValueError(f"pinned ({pinned}) and window ({window}) are together more than the {geometry.context} "
                         "tokens the model was trained for: lower them, or set positions to absolute")  # fmt: skip
    return pinned, window


def _max_len(settings: Settings, window: int, context: int) -> int:
    """With a window a text may go on for ever; without one, as far as the model was trained."""
    return settings.max_tokens_total if window else min(context, settings.max_tokens_total)


def eos_ids(folder: Path, vocab: int) -> tuple[int, ...]:
    """End-of-text tokens as the model's own files have them; none if they have none."""
    for path in (folder / name for name in _EOS_FILES):
        value = read_json(path, ContainerError).get("eos_token_id") if path.exists() else None
        if value is not None:
            return _token_ids(path, value, vocab)
    return ()


def _token_ids(path: Path, value: Any, vocab: int) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if not all(type(id) is int and 0 <= id < vocab for id in ids) or len(ids) > MAX_STOP_IDS:
        raise ContainerError(path, f"must be up to {MAX_STOP_IDS} token ids below {vocab}, is {str(value)[:80]}",
                             "eos_token_id")
    return tuple(dict.fromkeys(ids))


def _open(folder: Path, kv_format: str, slab_tokens: int) -> Info:
    """The engine's own checks."""
    with Engine.open(folder, kv_format=kv_format, slab_tokens=slab_tokens, max_tokens=1, max_sequences=1) as engine:
        return engine.info


def _fingerprint(isa: str) -> str:
    """Of the numerics, after a self-test (15 ms) on the instruction set that will be used."""
    outcome = selftest.run(isa)
    if not outcome.ok:
        raise EngineError(0, f"the self-test on {isa} gives {outcome.digest}, not {selftest.fingerprint()}: this build "
                          "computes wrong numbers on this CPU; set COLIBRI_ISA to another instruction set")  # fmt: skip
    return selftest.fingerprint()
