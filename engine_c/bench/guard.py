"""Compares the instruction counts of guard.c's cases, by callgrind, with the recorded ones.

    guard.py PROGRAM COMPILER [--update]

Counts depend on program, compiler and instruction set alone, not on the machine or its load; AVX2, since valgrind knows
no AVX-512. With the recorded compiler a case that grew by more than TOLERANCE is an error. Another compiler's counts
are not comparable: differences above WIDE are shown, as warnings. A case that shrank is told, so that it gets recorded.
Exit codes: 0 fine, 1 a case grew or is not recorded, 2 it could not run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

RECORD = Path(__file__).with_name("guard.json")
TOLERANCE = 0.03
WIDE = 0.25
ISA = "avx2"
_DUMP = re.compile(r"^desc: Trigger: Client Request: ([^\n]+)$.*?^totals: (\d+)$", re.M | re.S)


def measure(program: Path) -> dict[str, int]:
    """Instructions of each case."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["valgrind", "-q", "--tool=callgrind", f"--callgrind-out-file={folder}/out", program],
                       check=True, stdout=subprocess.DEVNULL, env={**os.environ, "COLIBRI_ISA": ISA})
        dumps = sorted(Path(folder).glob("out.*"), key=lambda path: int(path.suffix[1:]))
        found = [_DUMP.search(path.read_text()) for path in dumps]
    counts = {match[1]: int(match[2]) for match in found if match}
    if not counts:
        raise RuntimeError(f"{program} was built without <valgrind/callgrind.h>; install valgrind and build it again")
    return counts


def compare(recorded: dict[str, int], counts: dict[str, int], tolerance: float) -> tuple[list[str], list[str]]:
    """What is wrong, and what is worth knowing."""
    wrong = [f"{name}: is not recorded" for name in counts if name not in recorded]
    wrong += [f"{name}: is recorded but was not run" for name in recorded if name not in counts]
    known = []
    for name, now in counts.items():
        change = now / recorded[name] - 1 if name in recorded else 0.0
        line = f"{name}: {recorded.get(name, 0)} -> {now} instructions ({change:+.1%})"
        if change > tolerance:
            wrong.append(line)
        elif change < -tolerance:
            known.append(line)
    return wrong, known


def check(recorded: dict, compiler: str, counts: dict[str, int]) -> int:
    """Prints the verdict; the exit code."""
    same = recorded["compiler"] == compiler
    wrong, known = compare(recorded["counts"], counts, TOLERANCE if same else WIDE)
    for line in known:
        print(f"guard: better: {line}")
    for line in wrong:
        print(f"guard: {'WORSE' if same else 'warning'}: {line}")
    if not same:
        print(f"guard: recorded with {recorded['compiler']}, this is {compiler}: differences are warnings only")
        return 0
    if wrong:
        print("guard: find the cause (make callgrind CALLGRIND=guard), or, if this is meant, run `make guard-update` "
              "and say in the commit what was gained for it")
        return 1
    print(f"guard: {len(counts)} instruction counts within {TOLERANCE:.0%} of {RECORD.name}"
          + ("; record the better ones with `make guard-update`" if known else ""))
    return 0


def main(arguments: list[str]) -> int:
    program, compiler = Path(arguments[0]), arguments[1]
    if not shutil.which("valgrind"):
        print("guard: valgrind is not installed (Debian package valgrind)", file=sys.stderr)
        return 2
    try:
        counts = measure(program)
    except (RuntimeError, subprocess.CalledProcessError) as e:
        print(f"guard: {e}", file=sys.stderr)
        return 2
    if "--update" in arguments:
        RECORD.write_text(json.dumps({"compiler": compiler, "isa": ISA, "counts": counts}, indent=1) + "\n")
        print(f"guard: {len(counts)} counts of {compiler} written to {RECORD.name}")
        return 0
    return check(json.loads(RECORD.read_text()), compiler, counts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
