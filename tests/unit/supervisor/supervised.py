"""A program of its own for test_supervisor_*.py: the real supervisor over children of trivial roles. Service runs it.

    python supervised.py FOLDER [setting=value …]

The socket is FOLDER/s. The dispatcher and the pool write every message they get as a line of FOLDER/told and
FOLDER/pool. A worker does what the file FOLDER/worker says when it starts: a word of BEHAVIOURS. The pool says what it
finds in FOLDER/order when it hears anything.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from colibri_daemon.common import ipc, log
from colibri_daemon.common.arena import Arena
from colibri_daemon.common.exit_codes import Exit
from colibri_daemon.common.facts import ModelFacts
from colibri_daemon.common.pages import Field, Page
from colibri_daemon.common.settings import Settings, load_settings
from colibri_daemon.supervisor import sockets
from colibri_daemon.supervisor.loop import HANDLERS, Supervisor
from colibri_daemon.supervisor.notify import Notifier
from colibri_daemon.supervisor.roles import Roles
from colibri_daemon.supervisor.signals import Recorder
from colibri_daemon.supervisor.spawn import Role

FACTS = ModelFacts("folder", "made up", "id", "fingerprint", "llama", "q4", 100, 128, 128, (1,), 0, 64, "cache", "f16",
                   64, 4096, 1000)  # fmt: skip
PATIENCE = 20.0  # seconds until a test that waits for something fails


# ---- what children do ----------------------------------------------------------------------------------------------


def folder(settings: Settings) -> Path:
    return settings.socket.parent


def check(answer: int, settings: Settings, page: Page) -> int:
    facts = FACTS.to_wire() if (folder(settings) / "worker").exists() else {"errors": ["there is no model"]}
    with os.fdopen(answer, "w") as pipe:
        json.dump(facts, pipe)
    return Exit.CANNOT_LOAD if "errors" in facts else 0


def verify(answer: int, settings: Settings, page: Page) -> int:
    """Halfway until the file "sound" or "damaged" is there."""
    page[Field.TO_LOAD], page[Field.LOADED] = 100, 50
    while not (found := [name for name in ("sound", "damaged") if (folder(settings) / name).exists()]):
        time.sleep(0.01)
    with os.fdopen(answer, "w") as pipe:
        json.dump({} if found == ["sound"] else {"errors": ["block 7 is damaged"]}, pipe)
    return 0 if found == ["sound"] else Exit.CANNOT_LOAD


def dispatcher(listener: socket.socket, control: socket.socket, page: Page, settings: Settings,
               facts: ModelFacts) -> int:  # fmt: skip
    """Keeps the links it gets, so that workers see when it ends."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    links = []
    ipc.send_control(control, {"t": "ready"})
    with (folder(settings) / "told").open("a", buffering=1) as told:
        while True:
            select.select([control], [], [])
            page[Field.PROGRESS] += 1
            packet = ipc.receive_control(control)
            if packet is None:
                return 0
            message, fds = packet
            links += fds
            told.write(json.dumps(message | {"fds": len(fds), "from": os.getpid()}) + "\n")
            if message["t"] == "drain" and not (folder(settings) / "live").exists():
                ipc.send_control(control, {"t": "drained"})


def kvpool(control: socket.socket, page: Page, settings: Settings, facts: ModelFacts, arena: Arena,
           journal: int) -> int:  # fmt: skip
    """Counts its lives in the journal. Says once what the file "order" holds."""
    arena.reserve(lambda done: None)
    life = os.pread(journal, 100, 0) + b"*"
    os.pwrite(journal, life, 0)
    if (folder(settings) / "no_memory").exists():
        ipc.send_control(control, {"t": "failed", "reason": "no memory is left"})
        return Exit.CANNOT_LOAD
    links, ready = [], False
    with (folder(settings) / "pool").open("a", buffering=1) as told:
        while True:
            select.select([control], [], [], 0.1)
            page[Field.PROGRESS] += 1
            order = folder(settings) / "order"
            if order.exists():
                ipc.send_control(control, json.loads(order.read_text()))
                order.unlink()
            try:
                packet = ipc.receive_control(control)
            except BlockingIOError:
                continue
            if packet is None:
                return 0
            message, fds = packet
            links += fds
            told.write(json.dumps(message | {"fds": len(fds), "from": os.getpid(), "life": len(life)}) + "\n")
            if not ready:
                ready = ipc.send_control(control, {"t": "ready"})


def worker(link: socket.socket, control: socket.socket, page: Page, settings: Settings, facts: ModelFacts,
           arena: Arena) -> int:  # fmt: skip
    arena.map().close()
    return BEHAVIOURS[(folder(settings) / "worker").read_text()](link, control, page)


def serve(link: socket.socket, control: socket.socket, page: Page) -> int:
    """Ready, with a step done; takes new links. Keeps the pool's."""
    page[Field.STEPS] = 1
    ipc.send_control(control, {"t": "ready", "stall_ms": 100})
    pool: list[socket.socket] = []
    while True:
        select.select([control], [], [])
        packet = ipc.receive_control(control)
        if packet is None:
            return 0
        message, fds = packet
        if message["t"] == "pool":
            pool.append(socket.socket(fileno=fds[0]))
            continue
        assert (message, len(fds)) == ({"t": "link"}, 1)
        select.select([link], [], [])
        assert link.recv(1) == b"", "a new link although the old one works"
        link = socket.socket(fileno=fds[0])


def idle(link: socket.socket, control: socket.socket, page: Page) -> int:
    """Ready, but never did a step."""
    ipc.send_control(control, {"t": "ready"})
    time.sleep(600)
    return 0


def crash(link: socket.socket, control: socket.socket, page: Page) -> int:
    raise RuntimeError("at the start")


def refuse(link: socket.socket, control: socket.socket, page: Page) -> int:
    ipc.send_control(control, {"t": "failed", "reason": "tensor 9 is missing"})
    return Exit.CANNOT_LOAD


def hang(link: socket.socket, control: socket.socket, page: Page) -> int:
    """Ready, one step, then stuck in the next, deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    page[Field.STEPS], page[Field.BUSY] = 1, 1
    ipc.send_control(control, {"t": "ready"})
    while True:
        time.sleep(600)


def toil(link: socket.socket, control: socket.socket, page: Page) -> int:
    """Ready, one step, then busy for ever with the next; its loop never turns, the engine's counter does."""
    page[Field.STEPS], page[Field.BUSY] = 1, 1
    ipc.send_control(control, {"t": "ready"})
    while True:
        page[Field.PROGRESS] += 1


def load_for_ever(link: socket.socket, control: socket.socket, page: Page) -> int:
    time.sleep(600)
    return 0


BEHAVIOURS: dict[str, Any] = {f.__name__: f for f in (serve, idle, crash, refuse, hang, toil, load_for_ever)}
ROLES = Roles(*(Role(name, f"supervised:{name}", 0) for name in ("check", "verify", "kvpool", "dispatcher", "worker")))


def main(place: str, *flags: str) -> int:
    chosen = {"socket": f"{place}/s", "log_format": "json", **dict(flag.split("=") for flag in flags)}
    settings = load_settings(chosen, {})
    log.setup("supervisor", settings)
    with Recorder(HANDLERS) as signals:
        listener = sockets.bind(settings.socket, 0o600)
        try:
            return Supervisor(settings, listener, Notifier(os.environ), ROLES).run(signals)
        finally:
            listener.remove()
            listener.close()


# ---- the program and what can be seen of it --------------------------------------------------------------------------


class Service:
    """The program, its log and what its dispatcher was told."""

    def __init__(self, place: Path, worker: str = "serve", **settings: object) -> None:
        self.place = place
        self.says(worker)
        self._log = (place / "log").open("w+b")
        command = [sys.executable, __file__, str(place), *(f"{name}={value}" for name, value in settings.items())]
        environ = os.environ | {"NOTIFY_SOCKET": str(place / "notify")}
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=self._log, start_new_session=True,
                                        env=environ)  # fmt: skip

    def says(self, worker: str) -> None:
        """What workers that start from now on do. An empty word: there is no model."""
        new = self.place / "worker.new"
        new.write_text(worker)
        new.rename(self.place / "worker")
        if not worker:
            (self.place / "worker").unlink()

    def log(self, **wanted: object) -> list[dict[str, Any]]:
        lines = (self.place / "log").read_text().splitlines()
        parsed = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [line for line in parsed if wanted.items() <= line.items()]

    def told(self, kind: str) -> list[dict[str, Any]]:
        return self._lines("told", kind)

    def pool(self, kind: str) -> list[dict[str, Any]]:
        """What the pool was told."""
        return self._lines("pool", kind)

    def _lines(self, name: str, kind: str) -> list[dict[str, Any]]:
        path = self.place / name
        whole = [line for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        return [message for message in map(json.loads, whole) if message["t"] == kind]

    def state(self) -> dict[str, Any]:
        return (self.told("state") or [{"state": None, "ready": False, "workers": []}])[-1]

    def ready(self) -> dict[str, Any]:
        return self.until(lambda: self.state()["ready"] and self.state())

    def until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert time.monotonic() < deadline, f"waited in vain; log:\n{(self.place / 'log').read_text()}"
            time.sleep(0.01)
        return found

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        return self.process.wait(PATIENCE)

    def members(self) -> set[int]:
        """Every process of the program's session."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    state, _, _, session = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:4]
                    if int(session) == self.process.pid and state != "Z":
                        found.add(int(entry.name))
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.until(lambda: not self.members())
        self._log.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
