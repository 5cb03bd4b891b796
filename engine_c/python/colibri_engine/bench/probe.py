"""What this machine can do: memory read rate, int8 and float arithmetic (engine_c/host/probe.h)."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from .. import binding
from .._colibri import ffi, lib
from ..errors import ColibriError

RUNS = 7
RATES = ("read", "int8", "f32")


@dataclass(frozen=True)
class Ceilings:
    """Best rates of `threads` threads together; 1 multiply-add = 2 operations."""

    threads: int
    isa: str
    read: float  # bytes/s
    int8: float  # operations/s
    f32: float  # operations/s

    def better(self, other: Ceilings) -> Ceilings:
        """The higher of each rate; both are of the same threads and isa."""
        return Ceilings(self.threads, self.isa, *(max(getattr(self, rate), getattr(other, rate)) for rate in RATES))

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return (f"machine, {threads}, {self.isa}: read {self.read / 1e9:.1f} GB/s, int8 {self.int8 / 1e9:.0f} GOPS, "
                f"f32 {self.f32 / 1e9:.0f} GFLOPS")


def rate(kind: int, isa: str, threads: int, runs: int = RUNS) -> float:
    """One rate per second; kind is lib.COLIBRI_PROBE_*."""
    result = ffi.new("double *")
    code = lib.colibri_probe(kind, binding.ISA_NAMES[isa], threads, runs, result)
    if code:
        reason = f"this CPU has no {isa}" if code == errno.ENOTSUP else os.strerror(code)
        raise ColibriError(f"cannot probe the machine with {threads} threads: {reason}")
    return float(result[0])


def measure(isa: str, threads: int, runs: int = RUNS) -> Ceilings:
    """All three; takes about half a second."""
    kinds = (lib.COLIBRI_PROBE_READ, lib.COLIBRI_PROBE_INT8, lib.COLIBRI_PROBE_F32)
    return Ceilings(threads, isa, *(rate(kind, isa, threads, runs) for kind in kinds))
