"""What the daemon knows about its model without having it open: found by a short-lived child, told to everyone."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class FileFacts:
    """Which file, in which state."""

    name: str
    dev: int
    ino: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, name: str, fd: int) -> FileFacts:
        """Of an open file."""
        found = os.fstat(fd)
        return cls(name, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class ModelFacts:
    """Sizes in bytes; slab_bytes is one slab of slab_tokens tokens over all layers. pinned, window, positions and
    max_len are what the daemon will use, configuration applied. eos_ids as in generation_config.json, else
    config.json. files: manifest.json and the weight files, as they were when the check began."""

    folder: str
    name: str
    id: str
    fingerprint: str
    architecture: str
    quantization: str
    vocab_size: int
    context: int  # trained length
    max_len: int
    eos_ids: tuple[int, ...]
    pinned: int
    window: int
    positions: str
    kv_format: str
    slab_tokens: int
    slab_bytes: int
    weight_bytes: int
    files: tuple[FileFacts, ...] = ()
    layers: int = 0
    experts: int = 0  # of a layer

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, body: dict[str, Any]) -> ModelFacts:
        files = tuple(FileFacts(**file) for file in body["files"])
        return cls(**{**body, "eos_ids": tuple(body["eos_ids"]), "files": files})
