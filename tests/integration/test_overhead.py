"""loadtest/overhead: a small load through the real daemon is answered whole and reported; no times are judged."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "loadtest" / "overhead.py"
ROLES = {"supervisor", "dispatcher", "worker 0", "client", "generator"}
RATE, SECONDS, TOKENS, LONGER = 200, 2, 8, 16


def overhead(*arguments: object) -> str:
    command = [sys.executable, str(SCRIPT), "--rate", RATE, "--seconds", SECONDS, "--tokens", TOKENS, *arguments]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def numbers(value: Any) -> list[float]:
    return [value] if not isinstance(value, dict) else [n for part in value.values() for n in numbers(part)]


def test_every_request_is_done_and_every_process_is_told() -> None:
    report = json.loads(overhead("--runs", 1, "--connections", 2, "--poisson", "--json"))
    assert report["what"] == "overhead test"
    assert (report["plan"]["rate"], report["plan"]["tokens"]) == (RATE, TOKENS)
    (run,), median = report["runs"], report["median"]
    assert median == run
    assert run["failures"] == {}
    for load, requests, tokens in (("load", RATE * SECONDS, TOKENS),
                                   ("long_load", RATE * SECONDS // LONGER, TOKENS * LONGER)):
        assert abs(run[load]["requests"] - requests) <= 5 * math.sqrt(requests), "not the rate that was asked for"
        assert run[load]["tokens"] == run[load]["requests"] * tokens
    for name in ("cores", "us_per_token_with_requests", "us_per_token"):
        assert set(run[name]) >= ROLES, name
    assert all(map(math.isfinite, numbers({k: v for k, v in run.items() if k != "failures"})))


def test_the_summary_says_what_it_is() -> None:
    text = overhead("--runs", 1)
    assert text.startswith("overhead test")
    assert all(role in text for role in ROLES)
