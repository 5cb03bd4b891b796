"""Writes the generated files, or checks with --check that they are what they would be. Exit code 1: they are not."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from . import COMMAND, ROOT, TARGETS


def difference(path: Path, wanted: str) -> list[str]:
    """The first lines that differ; empty if there are none."""
    found = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = difflib.unified_diff(found.splitlines(), wanted.splitlines(), "in the tree", "generated", lineterm="", n=0)
    return list(lines)[:12]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; say what is out of date")
    check = parser.parse_args(arguments).check
    stale = 0
    for path, make in TARGETS.items():
        wanted = make()
        if not (lines := difference(path, wanted)):
            continue
        stale += 1
        print(f"{path.relative_to(ROOT)}: {f'out of date; run: {COMMAND}' if check else 'written'}")
        if check:
            print("\n".join(lines))
        else:
            path.write_text(wanted, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
