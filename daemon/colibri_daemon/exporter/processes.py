"""What the kernel knows of a process, from /proc."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """cpu: seconds, of user and system. started: seconds since the epoch. Zeros for a process that is gone."""

    cpu: float = 0.0
    resident: int = 0
    virtual: int = 0
    started: float = 0.0


def usage(pid: int) -> Usage:
    """One read of one small file; what others' pages it maps are counted too."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return Usage()
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return Usage((int(fields[11]) + int(fields[12])) / _TICKS, int(fields[21]) * _PAGE, int(fields[20]),
                 round(boot + int(fields[19]) / _TICKS, 2))  # fmt: skip


def descriptors(pid: int) -> tuple[int, int]:
    """(open, most); zeros if we may not know."""
    try:
        opened = len(os.listdir(f"/proc/{pid}/fd"))
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    except OSError:
        return 0, 0
    most = next((line.split()[3] for line in limits if line.startswith("Max open files")), "0")
    return opened, int(most) if most.isdigit() else 0
