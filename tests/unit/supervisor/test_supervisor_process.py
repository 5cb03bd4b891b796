"""What a process knows and does about itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from colibri_daemon.common import process

STDIO = """
import json, os, sys
from colibri_daemon.common import process
process.open_stdio()
taken = os.open("/dev/null", os.O_RDONLY)
open(sys.argv[1], "w").write(json.dumps([taken, [os.path.realpath(f"/proc/self/fd/{fd}") for fd in range(3)]]))
"""
# Heavy libraries and threads would make forking slow, big and wrong.
IMPORTS = """
import sys
import colibri_daemon.commands, colibri_daemon.supervisor.main
from colibri_daemon.common import process
print(process.thread_count(), *sorted({"numpy", "uvloop", "asyncio", "colibri_engine"} & set(sys.modules)))
"""


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-", "<&- >&- 2>&-", ">&- 2>&-", ""])
def test_stdio_is_never_a_file_of_ours(closed, tmp_path):
    out = tmp_path / "out"
    command = ["bash", "-c", f'exec "$@" {closed}', "-", sys.executable, "-c", STDIO, str(out)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert json.loads(out.read_text()) == [3, ["/dev/null"] * 3]


def test_resident_bytes():
    assert process.resident_bytes(os.getpid()) > 1 << 20
    assert process.resident_bytes(1 << 22) == 0  # above any pid


def test_age():
    asked = "from colibri_daemon.common import process; print(process.age())"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert 0 < float(done.stdout) < process.age()


def test_the_supervisor_stays_small():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]
