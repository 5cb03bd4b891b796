"""A program of its own for test_spawn.py: forks children of trivial roles, as only a process with one thread may.

    python spawned.py <scenario>
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from colibri_daemon.common import ipc, log
from colibri_daemon.common.arena import Arena
from colibri_daemon.common.facts import ModelFacts
from colibri_daemon.common.pages import Field, Page, make_pages
from colibri_daemon.common.settings import Settings, load_settings
from colibri_daemon.supervisor import handover
from colibri_daemon.supervisor.roles import Role
from colibri_daemon.supervisor.spawn import Death, Process, spawn

SETTINGS = load_settings({"log_format": "json"}, {})


def role(function: str) -> Role:
    return Role(f"test {function}", f"spawned:{function}", 123, 4)


# ---- what children do ----------------------------------------------------------------------------------------------


def describe(answer: int) -> int:
    """What a child is, as JSON."""
    print("printed by the child")
    os.write(answer, json.dumps(description(answer)).encode())
    return 7


def description(answer: int) -> dict[str, Any]:
    dispositions = {s.name: str(signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    return {
        "fds": open_descriptors(),
        "answer": answer,
        "signals": dispositions | {"SIGUSR1": str(signal.getsignal(signal.SIGUSR1))},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "stdin": sys.stdin.read() if sys.stdin else None,
        "title": Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode(),
        "oom": own_oom(),
        "nice": os.nice(0),
        "group": os.getpgrp(),
        "wakeup": signal.set_wakeup_fd(-1),
    }


def open_descriptors() -> dict[int, str]:
    """And what they are; without the one that lists them and the log's own way to stderr."""
    with os.scandir("/proc/self/fd") as listing:
        fds = sorted(int(entry.name) for entry in listing)
    links = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in fds if os.path.lexists(f"/proc/self/fd/{fd}")}
    return {fd: link for fd, link in links.items() if fd <= 2 or link != links[2]}


def tell_all(answer: int, sock: socket.socket, page: Page, settings: Settings, facts: ModelFacts, arena: Arena,
             number: int, names: dict[str, int]) -> int:  # fmt: skip
    """What came of a fresh child's arguments."""
    page[Field.STEPS] += 1
    sock.send(b"!")
    body = {
        "log_level": settings.log_level, "socket": str(settings.socket), "facts": facts.to_wire(), "number": number,
        "names": names, "arena": os.fstat(arena.fd).st_size, "blocking": sock.getblocking(), "argv": sys.orig_argv,
        "death": death_signal(), "child": description(answer),
        "inheritable": [fd for fd in open_descriptors() if fd > 2 and os.get_inheritable(fd)],
    }  # fmt: skip
    os.write(answer, json.dumps(body).encode())
    return 7


def death_signal() -> int:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)  # PR_GET_PDEATHSIG
    return number.value


def sleep(*_: Any) -> int:
    time.sleep(600)
    return 0


def fail() -> int:
    raise KeyError("a fault of ours")


def crash() -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def leave() -> int:
    sys.exit(3)


# ---- scenarios -----------------------------------------------------------------------------------------------------


def scenario_describe() -> dict[str, Any]:
    """From a parent with open descriptors, handlers, a wake-up descriptor and blocked signals."""
    noise = [os.open(os.devnull, os.O_RDONLY), *socket.socketpair()]
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    ours, theirs = os.pipe()
    _, wakeup = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wakeup)
    child = spawn(role("describe"), SETTINGS, (theirs,), theirs)
    signal.set_wakeup_fd(-1)
    os.close(theirs)
    body = json.loads(os.read(ours, 65536))
    body |= {"code": wait(child).code, "parent_group": os.getpgrp(), "parent_oom": own_oom(), "parent_nice": os.nice(0),
             "noise": len(noise)}
    body["parent_blocked"] = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    return body


def own_oom() -> int:
    return int(Path("/proc/self/oom_score_adj").read_text())


def wait(child: Process) -> Death:
    select.select([child.pidfd], [], [])
    death = child.reap()
    assert death is not None
    return death


def scenario_fresh() -> dict[str, Any]:
    """Everything that a role can be given, through exec."""
    noise = [os.open(os.devnull, os.O_RDONLY), *socket.socketpair()]
    ours, theirs = os.pipe()
    listening, speaking = ipc.control()
    page, other = make_pages(2)
    other[Field.STEPS], settings = 41, load_settings({"log_level": "debug", "log_format": "json", "socket": "/x y"}, {})
    facts = ModelFacts("f", "n", "i", "p", "a", "q4", 9, 8, 7, (1, 2), 0, 64, "cache", "f16", 64, 4096, 1000)
    arena = Arena.make(3, facts)
    extra = os.memfd_create("extra")
    kept = (theirs, speaking.fileno(), arena.fd, extra)
    child = spawn(role("tell_all"), settings, kept, theirs, speaking, other, settings, facts, arena, 5, {"x": extra},
                  fresh=True)
    os.close(theirs)
    select.select([ours], [], [])
    body = json.loads(os.read(ours, 65536))
    body |= {"code": wait(child).code, "steps": [page[Field.STEPS], other[Field.STEPS]]}
    body |= {"sent": listening.recv(9).decode(), "same": ModelFacts.from_wire(body["facts"]) == facts}
    return body | {"noise": len(noise), "extra": extra}


def scenario_fresh_crash() -> dict[str, Any]:
    death = wait(spawn(role("crash"), SETTINGS, (), fresh=True))
    foreign = subprocess.run([sys.executable, "-P", "-m", handover.MODULE, "0", "9"], check=False).returncode
    return {"code": death.code, "trace": death.trace, "foreign": foreign}


def scenario_codes() -> dict[str, Any]:
    deaths = {name: wait(spawn(role(name), SETTINGS, ())) for name in ("fail", "crash", "leave")}
    return {name: death.code for name, death in deaths.items()} | {"trace": deaths["crash"].trace}


def scenario_terminal() -> dict[str, Any]:
    """Ctrl-C reaches every process of the group; SIGTERM ends a child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ready, theirs = os.pipe()
    child = spawn(role("say_and_sleep"), SETTINGS, (theirs,), theirs)
    os.read(ready, 1)
    os.killpg(os.getpgrp(), signal.SIGINT)
    os.killpg(os.getpgrp(), signal.SIGHUP)
    alive = child.reap() is None
    child.signal(signal.SIGTERM)
    return {"alive": alive, "code": wait(child).code}


def say_and_sleep(ready: int) -> int:
    os.write(ready, b"!")
    return sleep()


def scenario_threads() -> dict[str, Any]:
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    with contextlib.suppress(RuntimeError):
        spawn(role("sleep"), SETTINGS, ())
        return {"refused": False}
    done.set()
    other.join()
    return {"refused": True}


def scenario_orphan() -> dict[str, Any]:
    """Prints the child's pid and waits to be killed; the child holds nothing that would tell it."""
    return orphan(fresh=False)


def scenario_fresh_orphan() -> dict[str, Any]:
    return orphan(fresh=True)


def orphan(fresh: bool) -> dict[str, Any]:
    child = spawn(role("sleep"), SETTINGS, (), fresh=fresh)
    print(json.dumps({"pid": child.pid}), flush=True)
    return {"code": sleep()}


if __name__ == "__main__":
    log.setup("test", SETTINGS)
    print(json.dumps(globals()[f"scenario_{sys.argv[1]}"]()))
