"""Real-time scheduling of the metrics process, as the kernel gives and takes it; see urgent.py for the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = [sys.executable, str(Path(__file__).with_name("urgent.py"))]
FAIR = ["chrt", "--other", "0"]  # whatever the tests run in
allowed = subprocess.run(["chrt", "--rr", "1", "true"], capture_output=True).returncode == 0
needs_real_time = pytest.mark.skipif(not allowed, reason="needs CAP_SYS_NICE or RLIMIT_RTPRIO")


def run(*before: str) -> tuple[list[str], list[str]]:
    """(scheduling policies, what was logged)."""
    done = subprocess.run([*before, *PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout), done.stderr.splitlines()


@needs_real_time
def test_who_asks_without_a_pause_takes_turns_for_a_while() -> None:
    seen, logged = run(*FAIR)
    assert seen == ["real time", "fair", "real time"]
    assert [line.partition(":")[0] for line in logged] == ["asked without a pause"]


def test_what_is_not_allowed_is_not_needed() -> None:
    drop = ["setpriv", "--bounding-set=-sys_nice", "--inh-caps=-sys_nice"] if os.geteuid() == 0 else []
    assert run(*FAIR, "prlimit", "--rtprio=0", *drop) == (["fair"], [])


@needs_real_time
def test_the_class_that_the_program_was_put_into_stays() -> None:
    assert run("chrt", "--idle", "0") == (["idle"], [])
