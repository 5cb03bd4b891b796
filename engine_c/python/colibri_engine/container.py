"""The model container on the Python side: manifest in memory, read from and written to its folder.

engine_c/CONTAINER.md is the format; writer.py creates containers and verify.py checks them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .errors import ContainerError
from .files import read_json
from .geometry import POLICY, TENSOR_NAMES, Geometry

FORMAT, VERSION = "colibri", 1
MANIFEST = "manifest.json"
FILES = ("dense.bin", "experts.bin")
# What travels along when the source has it.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
TENSOR_ALIGNMENT, EXPERT_ALIGNMENT = 64, 4096
_MAX_INTEGER = 1 << 53


@dataclass(frozen=True)
class TensorEntry:
    """One row of the manifest's tensor table; offset and bytes are within files[file]."""

    name: str
    role: str
    layer: int
    expert: int
    dtype: str
    layout: str
    shape: tuple[int, ...]
    file: int
    offset: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """manifest.json. files are (name, bytes); tensors in the order they are stored."""

    architecture: str
    name: str
    model_id: str
    quantization: str
    created_by: str
    geometry: Geometry
    files: tuple[tuple[str, int], ...]
    tensors: tuple[TensorEntry, ...]

    def to_json(self) -> str:
        """The file's text: one tensor a line, so that it can be read and diffed."""
        head = {
            "format": FORMAT,
            "version": VERSION,
            "architecture": self.architecture,
            "name": self.name,
            "model_id": self.model_id,
            "quantization": self.quantization,
            "created_by": self.created_by,
            "geometry": asdict(self.geometry),
            "files": [{"name": name, "bytes": size} for name, size in self.files],
        }
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        rows = ",\n  ".join(json.dumps(asdict(t)) for t in self.tensors)
        return "{" + ",\n ".join(lines) + ',\n "tensors": [\n  ' + rows + "]}\n"

    def computed_id(self) -> str:
        """What model_id must be for these tensors."""
        return model_id(self.architecture, self.geometry, self.tensors)

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Reads and validates a folder's manifest. Raises ContainerError naming the field at fault.

        Types and ranges only; whether the tensors fit the geometry and the files is :func:`.verify.structure`'s part.
        """
        path = folder / MANIFEST
        if not folder.is_dir():
            raise ContainerError(folder, "is not a folder; a model container is one")
        raw = _Object(path, read_json(path, ContainerError), "")
        if raw.text("format") != FORMAT or raw.integer("version") != VERSION:
            raise ContainerError(path, f"is not a {FORMAT} manifest of version {VERSION}", "format")
        architecture = raw.choice("architecture", TENSOR_NAMES)
        return cls(
            architecture=architecture,
            name=raw.text("name"),
            model_id=raw.text("model_id"),
            quantization=raw.text("quantization"),
            created_by=raw.text("created_by"),
            geometry=_geometry(raw),
            files=tuple((f.text("name"), f.integer("bytes")) for f in raw.objects("files")),
            tensors=tuple(_tensor(t) for t in raw.objects("tensors")),
        )


def model_id(architecture: str, geometry: Geometry, tensors: Sequence[TensorEntry]) -> str:
    """SHA-256 of what determines a model's logits.

    The hashed text is compact JSON, ASCII, keys sorted: [architecture, geometry, [[name, dtype, shape, sha256], ...]]
    with the tensors in file order (by file, then offset). Names of people's folders, tokenizers and offsets are not
    part of it, so the same weights have the same id wherever and by whichever way they were converted.
    """
    rows = [[t.name, t.dtype, list(t.shape), t.sha256] for t in sorted(tensors, key=lambda t: (t.file, t.offset))]
    text = json.dumps([architecture, asdict(geometry), rows], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


@dataclass(frozen=True)
class _Object:
    """A JSON object of the manifest with typed access; `where` is its place for messages."""

    path: Path
    values: dict[str, Any]
    where: str

    def fail(self, key: str, reason: str) -> ContainerError:
        return ContainerError(self.path, reason, f"{self.where}{key}")

    def get(self, key: str) -> Any:
        if key not in self.values:
            raise self.fail(key, "is missing")
        return self.values[key]

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.fail(key, "must be a string")
        return value

    def choice(self, key: str, allowed: Any) -> str:
        value = self.text(key)
        if value not in allowed:
            raise self.fail(key, f"is {value!r}, known are {', '.join(allowed)}")
        return value

    def integer(self, key: str, least: int = 0) -> int:
        return self._check_integer(key, self.get(key), least)

    def _check_integer(self, key: str, value: Any, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _MAX_INTEGER:
            raise self.fail(key, f"is {value!r}, must be an integer from {least} to 2^53")
        return value

    def dims(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        if not isinstance(value, list) or not 1 <= len(value) <= 2:
            raise self.fail(key, "must be a list of one or two dimensions")
        return tuple(self._check_integer(key, n, 1) for n in value)

    def objects(self, key: str) -> list[_Object]:
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
            raise self.fail(key, "must be a list of objects")
        return [_Object(self.path, v, f"{self.where}{key}[{i}].") for i, v in enumerate(value)]

    def object(self, key: str) -> _Object:
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.fail(key, "must be an object")
        return _Object(self.path, value, f"{self.where}{key}.")


def _geometry(raw: _Object) -> Geometry:
    inner = raw.object("geometry")
    geometry = Geometry(**{f.name: inner.integer(f.name) for f in fields(Geometry)})
    if problem := geometry.problem():
        raise raw.fail("geometry", problem)
    return geometry


def _tensor(raw: _Object) -> TensorEntry:
    name = raw.text("name")
    raw = _Object(raw.path, raw.values, f"{raw.where}({name}).")
    return TensorEntry(
        name=name,
        role=raw.text("role"),
        layer=raw.integer("layer", -1),
        expert=raw.integer("expert", -1),
        dtype=raw.choice("dtype", POLICY),
        layout=raw.choice("layout", ("row", "panel16")),
        shape=raw.dims("shape"),
        file=raw.integer("file"),
        offset=raw.integer("offset"),
        bytes=raw.integer("bytes"),
        sha256=raw.text("sha256"),
    )
