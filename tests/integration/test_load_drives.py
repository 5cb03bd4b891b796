"""loadtest/drive.py drives the real daemon, over its socket and over the gateway's HTTP, and misses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures.daemon import Daemon
from fixtures.gateway import Gateway

DRIVE = Path(__file__).resolve().parents[2] / "loadtest" / "drive.py"
SCENARIO = """requests = 12
warmup = 1
[arrival]
kind = "poisson"
rate = 50.0
[prefix]
length = 64
[prompt]
kind = "uniform"
low = 2
high = 10
[output]
kind = "uniform"
low = 8
high = 24
[cancel]
rate = 0.6
"""


@pytest.fixture(params=["socket", "http"])
def target(request: pytest.FixtureRequest, chat_daemon: Daemon) -> str:
    if request.param == "socket":
        return str(chat_daemon.socket)
    gateway: Gateway = request.getfixturevalue("chat_gateway")
    return gateway.url


def test_a_small_scenario_is_seen_whole(target: str, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SCENARIO)
    done = subprocess.run([sys.executable, DRIVE, "run", tmp_path / "s.toml", target, "--vocab", "500", "--json",
                           tmp_path / "r.json", "--html", tmp_path / "r.html"], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    figures, seen = result["figures"], result["requests"]
    assert (figures["sent"], figures["failed"]) == (12, {})
    assert figures["done"] + figures["left"] == 12
    assert figures["left"] == sum(r["left"] for r in seen) > 0
    assert figures["output_tokens"] == sum(r["tokens"] for r in seen)
    assert all(8 <= r["tokens"] <= 24 for r in seen if not r["left"])
    assert all(r["due"] <= r["first"] <= r["end"] for r in seen)
    assert {*figures["goodput"]} == {"chat", "rag", "mlperf", "batch"}
    assert "TTFT" in done.stdout
    assert "<svg" in (tmp_path / "r.html").read_text()
