"""Where a child that is a fresh interpreter begins; see handover.py. From then on it is a child like any other."""

from __future__ import annotations

import sys

from ..common import process
from ..common.exit_codes import Exit
from .handover import FORMAT, Birth, set_inheritable
from .spawn import leave, live


def main(form: str, fd: str) -> int:
    """The exit code; USAGE if it was born of a version that it does not understand."""
    if form != str(FORMAT):
        return Exit.USAGE
    birth = Birth.read(int(fd))
    set_inheritable(False)
    process.set_title(birth.role.title)
    return live(birth.role, birth.settings, birth.fault, birth.arguments)


if __name__ == "__main__":
    leave(lambda: main(*sys.argv[1:]))
