"""loadtest/against.py: ratios are medians over pairs, and bars judge them and whether every side got the same load."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

LOADTEST = Path(__file__).resolve().parents[3] / "loadtest"


@pytest.fixture
def against(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(LOADTEST))
    import against

    return against


def result(rate: float, itl: float, failed: int = 0, **more: float) -> dict[str, Any]:
    spread = {"p50": 1.0, "p99": itl}
    return {"figures": {"output_tokens_per_s": rate, "seconds": 10.0, "itl_ms": spread, "ttft_ms": spread,
                        "e2e_ms": spread, "failed": {"timeout": failed} if failed else {}}, **more}  # fmt: skip


def pairs(*ours: tuple[float, float, float]) -> list[dict[str, dict[str, Any]]]:
    """Of (tokens/s, p99, engine seconds) beside a peer at 100 tokens/s and 50 ms."""
    return [{"colibri": result(rate, itl, engine_seconds=engine), "llama-server": result(100, 50)}
            for rate, itl, engine in ours]  # fmt: skip


def test_ratios_are_medians_over_the_pairs(against: ModuleType) -> None:
    found = against.ratios(pairs((300, 30, 9.5), (500, 20, 8.5), (400, 10, 9.0)))
    assert found["colibri / llama-server: output tokens/s"] == {"value": 4.0, "better": "higher"}
    assert found["colibri / llama-server: ITL p99"] == {"value": 0.4, "better": "lower"}
    assert found[against.ENGINE] == {"value": 0.9, "better": "higher"}


@pytest.mark.parametrize(("measured", "met"), [
    ((300, 25, 9.0), [True, True, True]), ((299, 25, 9.0), [False, True, True]), ((300, 26, 8.9), [True, False, False]),
])  # fmt: skip
def test_a_bar_is_met_on_its_very_value(against: ModuleType, measured: Any, met: list[bool]) -> None:
    assert [bar[3] for bar in against.bars(against.ratios(pairs(measured)))] == met


def test_failures_of_any_side_are_told(against: ModuleType) -> None:
    made = pairs((300, 25, 9.0))
    assert against._failures(made)[1:] == (0.0, "= 0", True)
    made[0]["llama-server"] = result(100, 50, failed=3)
    assert against._failures(made)[1:] == (3.0, "= 0", False)


def test_the_middle_run_is_shown(against: ModuleType) -> None:
    shown = against.middle(pairs((300, 30, 9.5), (500, 20, 8.5), (400, 10, 9.0)))
    assert [r["figures"]["output_tokens_per_s"] for r in shown] == [400, 100]


def test_slots_hold_the_longest_request(against: ModuleType) -> None:
    assert against.longest(against.load("closed16")) == 192
    assert against.longest(against.load("long")) >= 1200 + 128
