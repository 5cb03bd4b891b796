"""The model's files, open from the check to the generation's end, so that every worker maps what was checked.

Files that are replaced by rename, as they should be, do no harm: a worker that starts later still gets the old ones,
until a reload opens the new. Files that are changed in place change under the running workers; that is noticed here,
and a process that touches a page which is no more ends with Exit.WEIGHTS_CHANGED (engine_c/host/fault.h).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..common.facts import FileFacts, ModelFacts

REMEDY = "put the right files in its place by rename, then reload"


@dataclass
class WeightFiles:
    """files: descriptors by the names that the manifest has, and the manifest's own."""

    folder: Path
    files: dict[str, int]
    _known: tuple[FileFacts, ...]

    @classmethod
    def open(cls, facts: ModelFacts) -> WeightFiles:
        """ValueError if what is there now is not what was checked, OSError if it cannot be opened."""
        opened = cls(Path(facts.folder), {}, facts.files)
        try:
            for known in facts.files:
                opened._open(known)
        except BaseException:
            opened.close()
            raise
        return opened

    def _open(self, known: FileFacts) -> None:
        path = self.folder / known.name
        fd = self.files[known.name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if FileFacts.of(known.name, fd) != known:
            raise ValueError(f"{path}: was replaced or changed while the model was checked; try again when all of its "
                             "files are in place")  # fmt: skip

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(self.files.values())

    def changed(self) -> str | None:
        """What has been changed in place since the check, and what to do; None if nothing has. Cheap."""
        for known in self._known:
            now = FileFacts.of(known.name, self.files[known.name])
            if (now.size, now.mtime_ns) != (known.size, known.mtime_ns):
                how = f"{now.size} bytes instead of {known.size}" if now.size != known.size else "written to"
                return f"{self.folder / known.name} was changed in place ({how}); {REMEDY}"
        return None

    def close(self) -> None:
        for fd in self.files.values():
            os.close(fd)
        self.files.clear()
