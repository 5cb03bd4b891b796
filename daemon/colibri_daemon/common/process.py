"""What a process does to itself and may know about another: title, death with its parent, descriptors, memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import setproctitle

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def set_title(role: str) -> None:
    """What ps shows: "colibrid: worker 0"."""
    setproctitle.setproctitle(f"colibrid: {role}")


def die_with_parent(parent: int) -> None:
    """SIGKILL to this process when its parent's main thread ends; at once if the parent has ended already."""
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def default_signals(ignored: Iterable[signal.Signals]) -> None:
    """Undoes every handler this program installed, ignores ``ignored`` and unblocks everything. What the program was
    started with (nohup) and what Python itself ignores (SIGPIPE) stays."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and not isinstance(signal.getsignal(number), signal.Handlers):
            signal.signal(number, signal.SIG_DFL)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def close_all_but(kept: Iterable[int]) -> None:
    """Closes every descriptor that is not in ``kept``."""
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    start = 0
    for fd in sorted({*kept, highest + 1}):
        if start < fd:  # closerange(0, 0) asks the kernel to close everything up to UINT_MAX
            os.closerange(start, fd)
        start = fd + 1


def open_stdio() -> None:
    """Makes sure that 0, 1 and 2 are open, so that no socket of ours gets one of these numbers."""
    null = os.open(os.devnull, os.O_RDWR)
    while null <= 2:
        os.set_inheritable(null, True)
        null = os.dup(null)
    os.close(null)


def null_stdin() -> None:
    """Reading stdin gives end of file."""
    null = os.open(os.devnull, os.O_RDONLY)
    if null:
        os.dup2(null, 0)
        os.close(null)


def raise_oom_score(by: int) -> None:
    """Makes this process a likelier victim when memory runs out than the one it came from. Best effort."""
    path = Path("/proc/self/oom_score_adj")
    try:
        path.write_text(str(min(1000, int(path.read_text()) + by)))
    except OSError:  # no /proc, or a sandbox that forbids it: the kernel's own choice stands
        return


def be_nice(by: int) -> None:
    """Gives way to others by so much, with all threads that this process will have. Best effort."""
    with contextlib.suppress(OSError):  # a sandbox that forbids it
        os.nice(by)


def go_first(most: float) -> None:
    """Real-time scheduling for the calling thread; SIGXCPU once it has computed for ``most`` seconds without a pause.
    Best effort: it takes RLIMIT_RTPRIO or CAP_SYS_NICE, and the program was not put into another class."""
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    hard = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
    with contextlib.suppress(OSError, ValueError):  # not allowed, or not for so long
        resource.setrlimit(resource.RLIMIT_RTTIME, (int(most * 1e6), hard))
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def take_turns() -> None:
    """Undoes go_first()."""
    if os.sched_getscheduler(0) == os.SCHED_RR:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def thread_count() -> int:
    """Threads of this process, those of C libraries included."""
    return len(os.listdir("/proc/self/task"))


def exit_status(pid: int) -> int | None:
    """The exit code, or minus the signal, of a process whose threads are ending or that is not reaped yet; 0 for one
    that lives. None if there is none, or nothing is told of it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[49]))  # proc_pid_stat(5): exit_code
    except (OSError, ValueError, IndexError):
        return None


def age() -> float:
    """Seconds since this process was started, the interpreter's own start included."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Proportional set size: shared pages counted by their share. 0 if it cannot be read. The kernel walks all mapped
    pages for this, milliseconds per gigabyte."""
    return _memory(pid, "Pss:")


def huge_file_bytes() -> int:
    """Of this process's mapped files, what the kernel maps in huge pages. As resident_bytes()."""
    return _memory(os.getpid(), "FilePmdMapped:")


def _memory(pid: int, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)
