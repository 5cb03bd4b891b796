"""colibrid selftest: one digest on every instruction set, and that it is the one compiled in."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner, Result
from colibri_engine import commands, selftest
from colibri_engine.selftest import Outcome


def run(*args: str, isa: str | None = None) -> Result:
    result = CliRunner().invoke(commands.selftest, args, env={"COLIBRI_ISA": isa})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_every_instruction_set_gives_the_fingerprint() -> None:
    result = run("--json")
    description = json.loads(result.stdout)
    assert re.fullmatch("[0-9a-f]{64}", description["fingerprint"])
    assert [o["isa"] for o in description["isas"]] == selftest.available()
    assert {o["digest"] for o in description["isas"]} == {description["fingerprint"]}
    assert description["ok"]
    assert result.exit_code == 0


def test_a_different_digest_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "run", lambda isa: Outcome(isa, "ab" * 32, isa != "ref"))
    result = run()
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["expected", selftest.fingerprint()]
    assert lines[1].split() == ["ref", "ab" * 32, "differs"]
    assert all(line.endswith("  ok") for line in lines[2:])


def test_colibri_isa_limits_what_runs() -> None:
    assert [o["isa"] for o in json.loads(run("--json", isa="ref").stdout)["isas"]] == ["ref"]
    result = run(isa="sse9")
    assert result.exit_code == 2
    assert "COLIBRI_ISA" in result.stderr


def test_one_instruction_set() -> None:
    assert [line.split()[0] for line in run("--isa", "ref").stdout.splitlines()] == ["expected", "ref"]
    assert run("--isa", "mmx").exit_code == 2


@pytest.mark.skipif("avx512" in selftest.available(), reason="this CPU has every instruction set")
def test_an_instruction_set_this_cpu_lacks_exits_with_2() -> None:
    result = run("--isa", "avx512")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
