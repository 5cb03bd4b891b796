"""A program of its own for test_supervisor_*.py: the real supervisor over children of trivial roles. Service runs it.

    python supervised.py FOLDER [setting=value …]

The socket is FOLDER/s, the configuration file FOLDER/config, if it is there. The dispatcher and the pool write every
message they get as a line of FOLDER/told and FOLDER/pool. A worker does what the file FOLDER/worker says when it
starts: a word of BEHAVIOURS. The pool says what it finds in FOLDER/order, the dispatcher what it finds in FOLDER/ask.
While FOLDER/live is there the dispatcher has live requests.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from colibri_daemon.common import ipc, log
from colibri_daemon.common.arena import Arena
from colibri_daemon.common.exit_codes import Exit
from colibri_daemon.common.facts import ModelFacts
from colibri_daemon.common.pages import Book, Field, Page
from colibri_daemon.common.settings import Settings, load_settings
from colibri_daemon.supervisor import sockets
from colibri_daemon.supervisor.loop import HANDLERS, Supervisor
from colibri_daemon.supervisor.notify import Notifier
from colibri_daemon.supervisor.roles import Role, Roles
from colibri_daemon.supervisor.signals import Recorder
from colibri_daemon.supervisor.tasks import package_version

FACTS = ModelFacts("folder", "made up", "id", "fingerprint", "llama", "q4", 100, 128, 128, (1,), 0, 64, "cache", "f16",
                   64, 4096, 1000)  # fmt: skip
PATIENCE = 20.0  # seconds until a test that waits for something fails


# ---- what children do ----------------------------------------------------------------------------------------------


def folder(settings: Settings) -> Path:
    return settings.socket.parent


def check(answer: int, settings: Settings, page: Page) -> int:
    """The model's id is its folder's name. The file "version" holds another version than the one that is installed."""
    version = folder(settings) / "version"
    facts = replace(FACTS, id=settings.model.name).to_wire()
    body = facts | {"version": version.read_text() if version.exists() else package_version()}
    body = body if (folder(settings) / "worker").exists() else {"errors": ["there is no model"]}
    with os.fdopen(answer, "w") as pipe:
        json.dump(body, pipe)
    return Exit.CANNOT_LOAD if "errors" in body else 0


def verify(answer: int, settings: Settings, page: Page) -> int:
    """Halfway until the file "sound" or "damaged" is there."""
    page[Field.TO_LOAD], page[Field.LOADED] = 100, 50
    while not (found := [name for name in ("sound", "damaged") if (folder(settings) / name).exists()]):
        time.sleep(0.01)
    with os.fdopen(answer, "w") as pipe:
        json.dump({} if found == ["sound"] else {"errors": ["block 7 is damaged"]}, pipe)
    return 0 if found == ["sound"] else Exit.CANNOT_LOAD


def dispatcher(listener: socket.socket, admin: socket.socket, control: socket.socket, page: Page, settings: Settings,
               facts: ModelFacts, generation: int, pool: int, book: Book) -> int:  # fmt: skip
    """Keeps the links it gets, so that workers see when it ends."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    links, old, ending = [], [], False
    if generation > 1 and (folder(settings) / "no_dispatcher").exists():
        return Exit.INTERNAL
    with (folder(settings) / "told").open("a", buffering=1) as told:
        born = {"t": "born", "generation": generation, "pool": pool, "id": facts.id, "argv": sys.orig_argv}
        told.write(json.dumps(born | {"from": os.getpid()}) + "\n")
        ipc.send_control(control, {"t": "ready"})
        while True:
            select.select([control], [], [], 0.1)
            page[Field.PROGRESS] += 1
            if not (folder(settings) / "live").exists():
                for number in old:
                    ipc.send_control(control, {"t": "empty", "generation": number})
                if ending:
                    ipc.send_control(control, {"t": "drained"})
                old, ending = [], False
            if said := taken(folder(settings) / "ask"):
                ipc.send_control(control, said)
            try:
                packet = ipc.receive_control(control)
            except BlockingIOError:
                continue
            if packet is None:
                return 0
            message, fds = packet
            links += fds
            told.write(json.dumps(message | {"fds": len(fds), "from": os.getpid()}) + "\n")
            ending = ending or message["t"] in ("drain", "retire")
            if message["t"] == "serve":
                old, generation = [*old, generation], message["generation"]


def taken(path: Path) -> Any:
    """What is in the file, which is gone then; None if it is not there."""
    if not path.exists():
        return None
    body = json.loads(path.read_text())
    path.unlink()
    return body


def kvpool(control: socket.socket, page: Page, settings: Settings, facts: ModelFacts, arena: Arena,
           journal: int) -> int:  # fmt: skip
    """Counts its lives in the journal. Says once what the file "order" holds. Retired, it has given back all but one
    slab."""
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
            if said := taken(folder(settings) / "order"):
                ipc.send_control(control, said)
            try:
                packet = ipc.receive_control(control)
            except BlockingIOError:
                continue
            if packet is None:
                return 0
            message, fds = packet
            links += fds
            about = {"fds": len(fds), "from": os.getpid(), "life": len(life), "of": facts.id}
            told.write(json.dumps(message | about) + "\n")
            if message["t"] == "retire":
                ipc.send_control(control, {"t": "held", "slabs": 1})
            if not ready:
                ready = ipc.send_control(control, {"t": "ready"})


def worker(link: socket.socket, control: socket.socket, page: Page, settings: Settings, facts: ModelFacts,
           arena: Arena, files: dict[str, int]) -> int:  # fmt: skip
    arena.map().close()
    return BEHAVIOURS[(folder(settings) / "worker").read_text()](link, control, page)


def serve(link: socket.socket, control: socket.socket, page: Page) -> int:
    """Ready, with a step done; takes new links. Keeps the pool's."""
    page[Field.STEPS] = 1
    ipc.send_control(control, {"t": "ready", "stall_ms": 100, "isa": "vax"})
    pool: list[socket.socket] = []
    while True:
        while not select.select([control], [], [], 0.1)[0]:
            page[Field.BEAT_NS] = time.monotonic_ns()
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
    while True:
        time.sleep(0.1)
        page[Field.BEAT_NS] = time.monotonic_ns()


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


def toil_in_step(link: socket.socket, control: socket.socket, page: Page) -> int:
    """As toil(), for two requests."""
    page[Field.KEYS], page[Field.KEYS + 1] = 11, 12
    return toil(link, control, page)


def load_for_ever(link: socket.socket, control: socket.socket, page: Page) -> int:
    time.sleep(600)
    return 0


BEHAVIOURS: dict[str, Any] = {f.__name__: f for f in (serve, idle, crash, refuse, hang, toil, toil_in_step,
                                                         load_for_ever)}
ROLES = Roles(*(Role(name, f"supervised:{name}", 0) for name in ("check", "verify", "kvpool", "dispatcher", "worker")))


def main(place: str, *flags: str) -> int:
    chosen = {"socket": f"{place}/s", "log_format": "json", "model": f"{place}/id",
              **dict(flag.split("=") for flag in flags)}  # fmt: skip
    config = Path(place, "config")
    config.touch()  # a reload may find more in it
    chosen = {name: value for name, value in chosen.items() if value}
    settings = load_settings(chosen, {}, config)
    log.setup("supervisor", settings)
    with Recorder(HANDLERS) as signals:
        listener, admin = (sockets.bind(path, 0o600) for path in (settings.socket, settings.admin_path))
        metrics = sockets.listen_http(settings.metrics, 0o600, None) if settings.metrics else None
        try:
            return Supervisor(settings, listener, admin, Notifier(os.environ), ROLES, metrics).run(signals)
        finally:
            for made in filter(None, (listener, admin, metrics)):
                made.remove()
                made.close()


# ---- the program and what can be seen of it --------------------------------------------------------------------------


class Service:
    """The program, its log and what its dispatcher was told."""

    def __init__(self, place: Path, worker: str = "serve", **settings: object) -> None:
        self.place = place
        self.says(worker)
        self._log = (place / "log").open("w+b")
        command = [sys.executable, __file__, str(place), *(f"{name}={value}" for name, value in settings.items())]
        environ = os.environ | {"NOTIFY_SOCKET": str(place / "notify"), "PYTHONPATH": str(Path(__file__).parent)}
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=self._log, start_new_session=True,
                                        env=environ)  # fmt: skip

    def says(self, worker: str) -> None:
        """What workers that start from now on do. An empty word: there is no model."""
        new = self.place / "worker.new"
        new.write_text(worker)
        new.rename(self.place / "worker")
        if not worker:
            (self.place / "worker").unlink()

    def configure(self, **settings: object) -> None:
        """What the next reload finds in the file."""
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
        (self.place / "config").write_text("".join(lines))

    def order(self, name: str, body: dict[str, Any]) -> None:
        """Has the pool ("order") or the dispatcher ("ask") say this; returns when it is under way."""
        new = self.place / f"{name}.new"
        new.write_text(json.dumps(body))
        new.rename(self.place / name)
        self.until(lambda: not (self.place / name).exists())

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
