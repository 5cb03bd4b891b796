"""A program of its own for test_supervisor_loop.py: the real supervisor over children of trivial roles.

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
import sys
import time
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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
