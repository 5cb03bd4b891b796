"""Every query of the dashboards and every rule, in a real Prometheus that scrapes a real daemon under load."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.models import Models

PROGRAM = Path(__file__).parents[2] / "loadtest" / "dashboards.py"


@pytest.mark.full
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")
def test_every_panel_shows_numbers(models: Models) -> None:
    command = [sys.executable, PROGRAM, "--model", models.tiny("q4"), "--seconds", "40"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert (report["failed"], report["empty"]) == ([], [])
    assert report["queries"] > 70
    assert report["scrape"]["scrapes"] > 100
