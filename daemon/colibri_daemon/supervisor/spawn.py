"""Forking a child, and what the child does before and after its role's own code.

Forking without exec is right only while nothing but this thread exists: locks held by other threads would stay locked
in the child for ever. So it happens in the main thread, and a second thread, even one of a C library, is an error.

A child keeps the descriptors it is told to, dies with the supervisor, and is deaf to the terminal: Ctrl-C goes to every
process of the foreground group, but the children must live on while the supervisor drains. They stay in that group, so
that Ctrl-Z and job control hold the daemon as a whole.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

from ..common import log, process
from ..common.exit_codes import Exit
from ..common.settings import Settings
from .handover import Birth, pages_of
from .roles import Role

DEAF_TO = (signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Death:
    """code: the exit code, or minus the signal. trace: where in Python a fatal signal struck, or nothing."""

    code: int
    trace: str = ""

    def __str__(self) -> str:
        number = -self.code
        if number > 0:
            return f"by {signal.Signals(number).name}" if number in iter(signal.Signals) else f"by signal {number}"
        return f"exit code {self.code}" + (f" ({Exit(self.code).name})" if self.code in iter(Exit) else "")


@dataclass(frozen=True)
class Process:
    """A child that was started. pidfd becomes readable when it has ended. fault: the pipe into which its interpreter
    writes a traceback when a fatal signal strikes. Both are closed by reap()."""

    pid: int
    pidfd: int
    fault: int

    def signal(self, number: signal.Signals) -> None:
        """To this process and no other: it has not been waited for, so its pid cannot have been used again."""
        os.kill(self.pid, number)

    def reap(self) -> Death | None:
        """How it ended, once it has."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return None
        trace = _own_frames(_contents(self.fault))
        os.close(self.pidfd)
        os.close(self.fault)
        return Death(os.waitstatus_to_exitcode(status), trace)


def _contents(pipe: int) -> str:
    try:
        return os.read(pipe, 1 << 16).decode("utf-8", "replace")
    except BlockingIOError:  # nothing there, and a descendant that must not exist still holds it
        return ""


def spawn(role: Role, settings: Settings, kept: Iterable[int], *arguments: object, fresh: bool = False) -> Process:
    """Starts role's entry with ``arguments`` in a child that has only ``kept`` and stdio open. fresh: as another
    interpreter, to which handover.py brings the arguments. OSError if the system has no room for it."""
    if threading.current_thread() is not threading.main_thread() or process.thread_count() != 1:
        raise RuntimeError("a child can only be forked from the main thread, before there is another one")
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # a trace that is too long is cut, not waited for
    try:
        pid, pidfd = _fork(_Child(role, settings, frozenset({0, 1, 2, writing, *kept}), arguments, os.getpid(), writing,
                                  fresh))
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return Process(pid, pidfd, reading)


def _own_frames(trace: str) -> str:
    """Without the frames below live(): those of the supervisor at the fork, which are still on the stack."""
    kept, inherited = [], False
    for line in trace.splitlines():
        inherited = line.startswith("  ") and (inherited or line.endswith((" in live", " in _begin")))
        if not inherited:
            kept.append(line)
    return "\n".join(kept)


@dataclass(frozen=True)
class _Child:
    """What a child needs to know. parent: the supervisor's pid."""

    role: Role
    settings: Settings
    kept: frozenset[int]
    arguments: tuple[object, ...]
    parent: int
    fault: int
    fresh: bool


def _fork(child: _Child) -> tuple[int, int]:
    # A signal that came between fork and reset would run our handler in the child and wake the wrong process.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    gc.freeze()  # else the child's collector writes to every object it inherited, and no page stays shared
    try:
        pid = os.fork()
        if pid == 0:
            _become(child)
        return pid, _pidfd(pid)
    finally:
        gc.unfreeze()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:  # out of descriptors: a child that cannot be watched must not run
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _become(child: _Child) -> NoReturn:
    """The child, from fork to _exit or exec. Never returns into the supervisor's frames, whose objects are still alive
    here: a collected socket object would close a descriptor number that is somebody else's by now."""
    leave(lambda: _begin(child))


def _begin(child: _Child) -> int:
    process.die_with_parent(child.parent)
    process.default_signals(DEAF_TO)
    process.null_stdin()
    process.close_all_but((*child.kept, *pages_of(child.arguments)) if child.fresh else child.kept)
    process.set_title(child.role.title)
    process.raise_oom_score(child.role.oom)
    process.be_nice(child.role.nice)
    if child.fresh:
        Birth(child.role, child.settings, child.fault, child.arguments).become()
    return live(child.role, child.settings, child.fault, child.arguments)


def live(role: Role, settings: Settings, fault: int, arguments: tuple[object, ...]) -> int:
    """Runs the role in this process."""
    faulthandler.enable(fault, all_threads=True)
    log.setup(role.title, settings)
    return int(role.load()(*arguments))


def leave(run: Callable[[], int]) -> NoReturn:
    """Runs it and ends the process with what it returns; nothing else of this process runs any more."""
    code = int(Exit.INTERNAL)
    try:
        code = int(run())
    except BaseException:
        log.get("spawn").exception("uncaught exception, the process ends", exit=code)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # nobody reads any more
                continue
        os._exit(code)
