"""Exit codes of colibrid's processes: what an operator and systemd's RestartPreventExitStatus can rely on."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    STOPPED = 0  # asked to stop, and did
    USAGE = 2  # command line or configuration refused
    BOOT_LOOP = 3  # a process failed to start five times in a row
    CANNOT_LOAD = 4  # the model cannot be loaded; starting again will not help
    SOCKET = 5  # the socket path is in use or cannot be used
    WEIGHTS_CHANGED = 6  # a mapped weight file was changed in place
    INTERNAL = 70  # a fault of ours
