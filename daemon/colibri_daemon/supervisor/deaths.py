"""How a process ended, in the words that others go by."""

from __future__ import annotations

import signal
from typing import Literal

from ..common.exit_codes import Exit
from .lifecycle import State

# Deaths after which whatever the process could write to is suspect.
FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})
Cause = Literal["fault", "exit", "hang", "killed", "stopped"]


def is_fault(code: int) -> bool:
    """code: the exit code, or minus the signal."""
    return -code in FAULTS


def cause(code: int, state: State) -> Cause:
    """state: that of its life when it ended. As in the "dead" message of common/ipc.py."""
    if state is State.HUNG:
        return "hang"
    if state is State.STOPPING or code == 0:
        return "stopped"
    if code == Exit.WEIGHTS_CHANGED:  # somebody's doing, not that of what it was computing
        return "killed"
    if code > 0:
        return "exit"
    return "fault" if is_fault(code) else "killed"
