"""A program of its own for test_spawn.py: forks children of trivial roles, as only a process with one thread may.

    python spawned.py <scenario>
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from colibri_daemon.common import log
from colibri_daemon.common.settings import load_settings
from colibri_daemon.supervisor.spawn import Death, Process, Role, spawn

SETTINGS = load_settings({"log_format": "json"}, {})


def role(function: str) -> Role:
    return Role(f"test {function}", f"spawned:{function}", 123)


# ---- what children do ----------------------------------------------------------------------------------------------


def describe(answer: int) -> int:
    """What a child is, as JSON."""
    dispositions = {s.name: str(signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    body = {
        "fds": open_descriptors(),
        "answer": answer,
        "signals": dispositions | {"SIGUSR1": str(signal.getsignal(signal.SIGUSR1))},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "stdin": sys.stdin.read() if sys.stdin else None,
        "title": Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode(),
        "oom": int(Path("/proc/self/oom_score_adj").read_text()),
        "group": os.getpgrp(),
        "wakeup": signal.set_wakeup_fd(-1),
    }
    print("printed by the child")
    os.write(answer, json.dumps(body).encode())
    return 7


def open_descriptors() -> dict[int, str]:
    """And what they are; without the one that lists them and the log's own way to stderr."""
    with os.scandir("/proc/self/fd") as listing:
        fds = sorted(int(entry.name) for entry in listing)
    links = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in fds if os.path.lexists(f"/proc/self/fd/{fd}")}
    return {fd: link for fd, link in links.items() if fd <= 2 or link != links[2]}


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
    body |= {"code": wait(child).code, "parent_group": os.getpgrp(), "parent_oom": own_oom(), "noise": len(noise)}
    body["parent_blocked"] = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    return body


def own_oom() -> int:
    return int(Path("/proc/self/oom_score_adj").read_text())


def wait(child: Process) -> Death:
    select.select([child.pidfd], [], [])
    death = child.reap()
    assert death is not None
    return death


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
    child = spawn(role("sleep"), SETTINGS, ())
    print(json.dumps({"pid": child.pid}), flush=True)
    return {"code": sleep()}


if __name__ == "__main__":
    log.setup("test", SETTINGS)
    print(json.dumps(globals()[f"scenario_{sys.argv[1]}"]()))
