"""Writing a container folder so that it is either complete in its place or not there at all.

Everything goes into a hidden sibling of the destination, is fsynced, and is renamed at the end; any exception,
including KeyboardInterrupt and a full disk, removes it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from . import __version__
from .container import EXPERT_ALIGNMENT, FILES, FORMAT, MANIFEST, TENSOR_ALIGNMENT, Manifest, TensorEntry, model_id
from .errors import ContainerError
from .files import read_json
from .geometry import Geometry, Slot


class ContainerWriter:
    """A context manager that receives a model's tensors in slots() order and commits the folder at its end.

    Memory: none beyond the chunk being written.
    """

    def __init__(self, destination: Path, force: bool = False) -> None:
        self.destination, self._force = destination, force
        self._tensors: list[TensorEntry] = []
        self._sizes = [0] * len(FILES)

    def __enter__(self) -> Self:
        check_destination(self.destination, self._force)
        parent = self.destination.absolute().parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix=f".{self.destination.name}.", suffix=".partial", dir=parent))
        except OSError as e:
            raise self._error(e) from e
        try:
            self._folder.chmod(0o755)
            self._files = [open(self._folder / name, "xb", buffering=0) for name in FILES]  # noqa: SIM115
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for f in self._files:
            f.close()
        if self._folder.exists():
            shutil.rmtree(self._folder, ignore_errors=True)

    def reserve(self, size: int) -> None:
        """Refuses now what the disk cannot hold later. `size` is in bytes."""
        free = shutil.disk_usage(self._folder).free
        if size > free:
            raise ContainerError(self.destination, f"needs {size} bytes, its file system has {free} free")

    def add(self, slot: Slot, dtype: str, chunks: Iterable[Any]) -> None:
        """Appends a tensor, given as buffers in stored order."""
        whole_expert = slot.role == "ffn_gate"
        offset = self._align(slot.file, EXPERT_ALIGNMENT if whole_expert else TENSOR_ALIGNMENT)
        digest = hashlib.sha256()
        for chunk in chunks:
            digest.update(chunk)
            self._write(slot.file, chunk)
        self._tensors.append(
            TensorEntry(
                name=slot.name,
                role=slot.role,
                layer=slot.layer,
                expert=slot.expert,
                dtype=dtype,
                layout=slot.layout,
                shape=slot.shape,
                file=slot.file,
                offset=offset,
                bytes=self._sizes[slot.file] - offset,
                sha256=digest.hexdigest(),
            )
        )

    def companion(self, name: str, data: bytes) -> None:
        """Puts a small file beside the weights."""
        try:
            with open(self._folder / name, "xb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
        except OSError as e:
            raise self._error(e) from e

    def commit(self, architecture: str, name: str, quantization: str, geometry: Geometry) -> Manifest:
        """Writes the manifest, makes everything durable and moves the folder into its place."""
        manifest = Manifest(
            architecture=architecture,
            name=name.encode("utf-8", "replace").decode(),  # a folder's name need not be valid text
            model_id=model_id(architecture, geometry, self._tensors),
            quantization=quantization,
            created_by=f"{FORMAT} {__version__}",
            geometry=geometry,
            files=tuple(zip(FILES, self._sizes, strict=True)),
            tensors=tuple(self._tensors),
        )
        try:
            for f in self._files:
                _settle(f.fileno())
            self.companion(MANIFEST, manifest.to_json().encode())
            _sync_folder(self._folder)
            self._move()
        except OSError as e:
            raise self._error(e) from e
        return manifest

    def _align(self, file: int, alignment: int) -> int:
        self._write(file, bytes(-self._sizes[file] % alignment))
        return self._sizes[file]

    def _write(self, file: int, data: Any) -> None:
        view = memoryview(data).cast("B")
        self._sizes[file] += len(view)
        try:
            while view:
                view = view[self._files[file].write(view) :]
        except OSError as e:
            raise self._error(e) from e

    def _move(self) -> None:
        """Renames into place. With force an older model steps aside first and returns if the rename fails."""
        target = self.destination.absolute()
        check_destination(target, self._force)  # someone may have come first
        aside = self._folder.with_suffix(".replaced")
        had_old = target.exists()
        if had_old:
            os.rename(target, aside)
        try:
            os.rename(self._folder, target)
        except BaseException:
            if had_old:
                os.rename(aside, target)
            raise
        _sync_folder(target.parent)
        shutil.rmtree(aside, ignore_errors=True)

    def _error(self, e: OSError) -> ContainerError:
        return ContainerError(self.destination, f"cannot be written: {e.strerror or e}; nothing was left behind")


def check_destination(path: Path, force: bool) -> None:
    """Refuses a destination that exists, or with force one that is anything but a container or an empty folder."""
    if path.name in ("", ".."):
        raise ContainerError(path, "is no place for a new folder; give it a name")
    if not (path.exists() or path.is_symlink()):
        return
    if not force:
        raise ContainerError(path, "exists already; choose another name or replace it with --force")
    if path.is_symlink() or not path.is_dir():
        raise ContainerError(path, "is not a folder and will not be replaced")
    if any(path.iterdir()) and not _is_container(path):
        raise ContainerError(path, "is not a model container and will not be replaced; remove it yourself")


def _is_container(path: Path) -> bool:
    try:
        return read_json(path / MANIFEST, ContainerError).get("format") == FORMAT
    except ContainerError:
        return False


def _settle(fd: int) -> None:
    """Makes the file durable and drops it from the page cache, which holds it in the small pages it was written by:
    whoever loads it reads it again, in huge pages where the file system has them (decode about 1.06 times as fast)."""
    os.fsync(fd)
    with suppress(OSError, AttributeError):  # best effort; not everywhere
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
