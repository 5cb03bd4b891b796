"""What the daemon's processes take beside weights, KV memory and the engine's scratch memory: measured on a daemon of
the same configuration that is started on a model too small to matter."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from colibri_engine.convert.synth import synthesise
from colibri_engine.errors import ColibriError
from colibri_engine.geometry import Geometry, eps_bits

from ..common.process import resident_bytes
from ..common.settings import Settings

_LITTLE = Geometry(vocab=256, hidden=64, layers=1, heads=2, kv_heads=1, head_dim=32, inter=64, experts=2, top_k=1,
                   context=512, window=0, norm_eps_bits=eps_bits(1e-5), tied_head=0)  # fmt: skip
_KV = 1 << 20  # bytes
_WAIT = 60.0  # seconds for it to be ready


def measure(settings: Settings) -> dict[str, int]:
    """Role → proportional resident bytes, mapped binaries included; those of the workers are added up. ColibriError if
    the daemon does not get ready."""
    with tempfile.TemporaryDirectory(prefix="colibri-plan-") as name:
        folder = Path(name)
        synthesise(folder / "model", _LITTLE)
        with _daemon(folder, settings) as pid:
            found: Counter[str] = Counter()
            for role, process in _processes(pid):
                found[role] += resident_bytes(process)
            return dict(found)


@contextmanager
def _daemon(folder: Path, settings: Settings) -> Iterator[int]:
    """The supervisor's pid, once it is ready."""
    flags = {"model": folder / "model", "socket": folder / "s", "workers": settings.workers, "threads": 1,
             "max-seqs": settings.max_seqs, "kv-bytes": _KV, "log-level": "error"}  # fmt: skip
    if settings.metrics:
        flags["metrics"] = f"unix:{folder}/m"
    command = [sys.executable, "-c", "from colibri_daemon.cli import main; main()", "serve",
               *(f"--{flag}={value}" for flag, value in flags.items())]  # fmt: skip
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith("COLIBRI_") or name == "COLIBRI_ISA"}  # fmt: skip
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(folder / "n"))
        process = subprocess.Popen(command, env=kept | {"NOTIFY_SOCKET": str(folder / "n")}, stderr=subprocess.PIPE)
        try:
            _wait(told, process)
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()


def _wait(told: socket.socket, process: subprocess.Popen[bytes]) -> None:
    told.settimeout(0.1)
    for _ in range(int(_WAIT / 0.1)):
        with suppress(TimeoutError):
            if b"READY=1" in told.recv(4096).split(b"\n"):
                return
        if process.poll() is not None:
            break
    process.kill()
    said = process.communicate()[1].decode(errors="replace").strip().splitlines()
    reason = said[-1] if said else "no reason given"
    raise ColibriError(f"a daemon to measure the processes on did not get ready: {reason}")


def _processes(supervisor: int) -> Iterator[tuple[str, int]]:
    """(role, pid) as ps shows them; workers without their number. Titles come a moment after the fork."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    for pid in (supervisor, *map(int, children)):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        yield title.removeprefix("colibrid: ").split(" ")[0], pid
