"""The first layers of a model opened as a model of their own: what a whole one takes can be timed on a part of it.

Nothing is converted or copied: the engine gets a manifest that ends after these layers, and the folder's own files, of
which only these layers' pages are ever touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from .container import MANIFEST, Manifest
from .engine import Engine


def layer_bytes(manifest: Manifest) -> int:
    """Of the weights of one layer, on average."""
    return sum(t.bytes for t in manifest.tensors if t.layer >= 0) // manifest.geometry.layers


def layers_of(manifest: Manifest, least_bytes: int) -> int:
    """How many layers have so many bytes together; at most all."""
    return min(manifest.geometry.layers, max(1, -(-least_bytes // max(1, layer_bytes(manifest)))))


@contextmanager
def first_layers(folder: Path, manifest: Manifest, layers: int, **options: Any) -> Iterator[Engine]:
    """An engine of the first so many layers, with embedding and head. options: as Engine has them, but for files."""
    tensors = tuple(t for t in manifest.tensors if t.layer < layers)
    cut = replace(manifest, geometry=replace(manifest.geometry, layers=layers), tensors=tensors)
    with ExitStack() as opened:

        def keep(fd: int) -> int:
            opened.callback(os.close, fd)
            return fd

        files = {name: keep(os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)) for name, _ in manifest.files}
        for t in tensors:
            os.posix_fadvise(files[manifest.files[t.file][0]], t.offset, t.bytes, os.POSIX_FADV_WILLNEED)
        text = keep(os.memfd_create("colibri-slice", os.MFD_CLOEXEC))
        with open(text, "wb", closefd=False) as file:
            file.write(cut.to_json().encode())
        with Engine.open(folder, files={**files, MANIFEST: text}, **options) as engine:
            yield engine
