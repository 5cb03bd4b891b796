"""colibri-bench: how fast the engine is on this machine, and how far that is from what the machine could do.

probe.py measures the machine, ceiling.py says what a test costs at least, run.py times it, report.py prints it.
"""

from __future__ import annotations


def main() -> None:
    """The command's entry point."""
    from .cli import bench

    bench(prog_name="colibri-bench")
