"""The numerics fingerprint: colibri_selftest on the instruction sets of this CPU.

The same digest everywhere is what lets a golden file, a prefix cache or a resumed stream move between machines.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from . import binding
from ._colibri import ffi, lib
from .binding import Buffer, check, new


@dataclass(frozen=True)
class Outcome:
    """SHA-256 of the self-test on one instruction set; ok if it is the compiled-in fingerprint."""

    isa: str
    digest: str
    ok: bool


def fingerprint() -> str:
    """The digest every correct build must give, 64 hex digits."""
    return ffi.string(lib.colibri_fingerprint()).decode()


def available() -> list[str]:
    """Instruction sets of this CPU from the plainest to the best, no higher than COLIBRI_ISA if that is set."""
    limit, err = ffi.new("uint32_t *"), new("colibri_error_t")
    check(lib.colibri_host_isa(limit, err), err)
    best = lib.colibri_best_isa()
    top = min(best, limit[0]) if limit[0] != lib.COLIBRI_ISA_AUTO else best
    return [name for name, level in binding.ISA_NAMES.items() if level <= top]


def run(isa: str) -> Outcome:
    """The self-test on one instruction set. EngineError if this CPU lacks it."""
    err, digest = new("colibri_error_t"), ffi.new("uint8_t[32]")
    workspace = Buffer(lib.COLIBRI_WORKSPACE, lib.colibri_selftest_size())
    status = lib.colibri_selftest(binding.ISA_NAMES[isa], workspace.c, digest, err)
    if status != lib.COLIBRI_SELFTEST:
        check(status, err)
    return Outcome(isa, bytes(digest).hex(), status == lib.COLIBRI_OK)


def describe(outcomes: list[Outcome]) -> dict[str, Any]:
    """What --json prints."""
    return {
        "version": ffi.string(lib.colibri_version()).decode(),
        "fingerprint": fingerprint(),
        "ok": all(o.ok for o in outcomes),
        "isas": [asdict(o) for o in outcomes],
    }


def table(description: dict[str, Any]) -> str:
    """The same for people."""
    rows = [f"{o['isa']:<8}  {o['digest']}  {'ok' if o['ok'] else 'differs'}" for o in description["isas"]]
    return "\n".join([f"{'expected':<8}  {description['fingerprint']}", *rows])
