"""The verdict of the instruction-count guard, engine_c/bench/guard.py; `make guard` is a step of `make test`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def _load():
    spec = importlib.util.spec_from_file_location("guard", ROOT / "engine_c/bench/guard.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


guard = _load()
RECORDED = {"compiler": "gcc 12", "counts": {"gemm": 1000, "softmax": 200}}


@pytest.mark.parametrize(("counts", "code", "told"), [
    ({"gemm": 1020, "softmax": 200}, 0, "2 instruction counts within 3%"),
    ({"gemm": 1040, "softmax": 200}, 1, "WORSE: gemm: 1000 -> 1040 instructions (+4.0%)"),
    ({"gemm": 900, "softmax": 200}, 0, "better: gemm: 1000 -> 900 instructions (-10.0%)"),
    ({"gemm": 1000}, 1, "softmax: is recorded but was not run"),
    ({"gemm": 1000, "softmax": 200, "new": 1}, 1, "new: is not recorded"),
])  # fmt: skip
def test_verdict(counts: dict[str, int], code: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert guard.check(RECORDED, "gcc 12", counts) == code
    out = capsys.readouterr().out
    assert told in out
    assert ("make guard-update" in out) == (code == 1 or "better" in out)


def test_another_compiler_only_warns(capsys: pytest.CaptureFixture[str]) -> None:
    assert guard.check(RECORDED, "gcc 13", {"gemm": 1300, "softmax": 240}) == 0
    out = capsys.readouterr().out
    assert "warning: gemm: 1000 -> 1300" in out
    assert "softmax" not in out


def test_the_record_covers_kernels_and_forward() -> None:
    counts = json.loads((ROOT / "engine_c/bench/guard.json").read_text())["counts"]
    assert {"gemm q4, 1 rows", "gemm q8, 32 rows", "attention scores, 48 rows"} <= set(counts)
    assert "forward of the micro model" in counts
    assert all(count > 0 for count in counts.values())
