"""The daemon that a load test sets up, changes and looks into: a process of its own with a configuration file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from overhead import BIN, processes


class Daemon:
    """A running daemon whose configuration file can be rewritten. pid: the supervisor's."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.socket, self.log, self.config = folder / "s", folder / "log", folder / "colibrid.toml"
        self._settings = settings
        self.configure()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen([BIN / "colibrid", "serve", "--config", self.config], stderr=log)
        self.pid = self._process.pid

    def configure(self, **changes: Any) -> None:
        """Writes the file, whole or not at all; it counts from the next reload on."""
        self._settings |= changes
        values = {"socket": self.socket, "log_format": "json"} | self._settings
        text = "".join(f"{name} = {json.dumps(v if isinstance(v, (int, list)) else str(v))}\n"
                       for name, v in values.items())  # fmt: skip
        part = self.config.with_suffix(".part")
        part.write_text(text)
        part.rename(self.config)

    def lines(self, **wanted: Any) -> list[dict[str, Any]]:
        """Of the log."""
        found = (json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{"))
        return [line for line in found if wanted.items() <= line.items()]

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def resources(daemon: Daemon) -> dict[str, dict[str, int]]:
    """By role: resident KiB (proportional), descriptors, threads."""
    found = {}
    for role, pid in processes(daemon.pid).items():
        proc = Path(f"/proc/{pid}")
        pss = next(line for line in (proc / "smaps_rollup").read_text().splitlines() if line.startswith("Pss_Anon"))
        found[role] = {"anon_kib": int(pss.split()[1]), "fds": len(os.listdir(proc / "fd")),
                       "threads": len(os.listdir(proc / "task"))}  # fmt: skip
    return found
