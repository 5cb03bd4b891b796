"""Every kind of process dies, hangs or is replaced at random moments while streams run: loadtest/faults.py, briefly. It
compares every output with the one at rest and looks for anything left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.models import Models

FAULTS = Path(__file__).parents[2] / "loadtest" / "faults.py"
# scenario, how many, least share that must strike live streams
SCENARIOS = [("kill-workers", 6, 0.5), ("segv-workers", 2, 0.5), ("hang-workers", 1, 0), ("kill-pool", 3, 1),
             ("kill-dispatcher", 3, 1), ("reload", 4, 0.5)]  # fmt: skip


@pytest.mark.parametrize(("scenario", "count", "share"), SCENARIOS)
def test_nothing_is_lost(models: Models, scenario: str, count: int, share: float) -> None:
    command = [sys.executable, FAULTS, scenario, "--model", models.tiny("q4"), "--other-model", models.tiny("q8"),
               "--count", str(count), "--streams", "12", "--kinds", "8", "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert (report["failed"], report["wrong"], report["findings"]) == ({}, 0, [])
    assert report["faults"] == count
    assert report["hits"] >= share * count
    assert report["done"] > 0
