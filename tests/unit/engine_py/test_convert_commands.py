"""convert, synth-model, inspect and verify as commands: exit codes, what goes to stdout and stderr, interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import colibri_engine
import pytest
from click.testing import CliRunner, Result
from colibri_engine import commands
from colibri_engine.container import Manifest
from colibri_engine.convert.progress import human, progress
from fixtures.checkpoints import LLAMA, MIXTRAL, gguf_tensors, random_tensors, write_checkpoint, write_gguf

SYNTH = ["--layers", "1", "--hidden", "64", "--inter", "96", "--heads", "4", "--kv-heads", "2", "--head-dim", "16",
         "--experts", "4", "--vocab", "100", "--context", "256"]  # fmt: skip


def run(command: click.Command, *args: object) -> Result:
    result = CliRunner().invoke(command, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


@pytest.fixture
def model(tmp_path: Path) -> Path:
    assert run(commands.convert, write_checkpoint(tmp_path / "src", MIXTRAL), tmp_path / "model").exit_code == 0
    return tmp_path / "model"


def test_convert_reports_sizes_time_and_id(tmp_path: Path) -> None:
    result = run(commands.convert, write_checkpoint(tmp_path / "src", MIXTRAL), tmp_path / "model", "--format", "q8")
    assert result.exit_code == 0
    assert result.stdout == ""
    manifest = Manifest.load(tmp_path / "model")
    for part in ("dense.bin", "experts.bin", " s (", manifest.model_id, "100 %", "warning:"):
        assert part in result.stderr


def test_quiet_says_warnings_only(tmp_path: Path) -> None:
    src = write_checkpoint(tmp_path / "src", MIXTRAL)
    (src / "tokenizer.json").write_text("{}")
    result = run(commands.convert, src, tmp_path / "model", "--quiet")
    assert (result.exit_code, result.output) == (0, "")


def test_upcycle_and_force(tmp_path: Path, model: Path) -> None:
    dense = write_checkpoint(tmp_path / "dense", LLAMA)
    assert run(commands.convert, dense, model, "--upcycle", 4).exit_code == 2
    assert run(commands.convert, dense, model, "--upcycle", 4, "--force").exit_code == 0
    assert Manifest.load(model).geometry.experts == 4


@pytest.mark.parametrize("args", [
    ["{missing}", "{new}"],
    ["{src}", "{model}"],
    ["{src}", "{new}", "--format", "q5"],
    ["{src}", "{new}", "--upcycle", "1"],
    ["{src}", "{new}", "--upcycle", "4"],
    ["{src}"],
])  # fmt: skip
def test_what_cannot_be_used_exits_with_2(tmp_path: Path, model: Path, args: list[str]) -> None:
    names = {"missing": tmp_path / "missing", "new": tmp_path / "new", "src": tmp_path / "src", "model": model}
    result = run(commands.convert, *(a.format(**names) for a in args))
    assert result.exit_code == 2
    assert "rror: " in result.stderr
    assert not (tmp_path / "new").exists()


def test_synth_model_inspect_and_verify(tmp_path: Path) -> None:
    assert run(commands.synth_model, tmp_path / "m", *SYNTH, "--format", "q8", "--seed", 3).exit_code == 0
    assert run(commands.verify, tmp_path / "m").exit_code == 0
    description = json.loads(run(commands.inspect, tmp_path / "m", "--json").stdout)
    assert description["geometry"]["hidden"] == 64
    assert description["parameters"] == {"total": 99_264, "active": 62_400}
    assert description["attention_default"] == {"pinned": 64, "window": 192}
    assert description["kv_bytes_per_token"] == 2 * 1 * 2 * 16 * 2
    assert description["bytes"]["total"] == sum(description["bytes"]["files"].values())
    assert run(commands.synth_model, tmp_path / "bad", *SYNTH, "--head-dim", "7").exit_code == 2


def test_inspect_is_readable(model: Path) -> None:
    result = run(commands.inspect, model)
    assert result.exit_code == 0
    for part in (
        "mixtral",
        "q4",
        Manifest.load(model).model_id,
        "3 experts",
        "top-2",
        "active per token",
        "config.json",
    ):
        assert part in result.stdout


def test_verify_exits_with_1_and_names_file_and_tensor(model: Path) -> None:
    with open(model / "experts.bin", "r+b") as f:
        f.write(b"\xff" * 16)
    result = run(commands.verify, model, "--quiet")
    assert result.exit_code == 1
    assert f"{model}/experts.bin: model.layers.0.block_sparse_moe.experts.0.w1.weight: " in result.stderr


@pytest.mark.parametrize("command", [commands.inspect, commands.verify], ids=["inspect", "verify"])
def test_no_model_exits_with_2(tmp_path: Path, command: click.Command) -> None:
    assert run(command, tmp_path / "missing").exit_code == 2
    assert run(command, tmp_path).exit_code == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """A model that takes many seconds to draw, stopped as soon as something of it is on disk."""
    code = "from colibri_engine.commands import synth_model; synth_model()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "dst"), *SYNTH, "--vocab", "1000000", "--hidden", "512"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while process.poll() is None and not list(tmp_path.glob(".dst.*/dense.bin")):
            time.sleep(0.01)
        process.send_signal(number)
        _, stderr = process.communicate()
    finally:
        process.kill()
    assert process.returncode == commands.INTERRUPTED, stderr
    assert "interrupted" in stderr
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


def test_progress_is_a_line_every_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("working") as advance:
        for done in range(0, 1001, 7):
            advance(done, 1000)
        advance(1000, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"working: {n} %" for n in range(10, 101, 10)]


@pytest.mark.parametrize(("size", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (26e9, "26 GB"),
                                            (5e13, "50 TB")])  # fmt: skip
def test_human_sizes(size: float, text: str) -> None:
    assert human(size) == text


def test_the_version_is_the_headers() -> None:
    """created_by is written from it."""
    header = Path(__file__).parents[3] / "engine_c" / "include" / "colibri.h"
    assert f'#define COLIBRI_VERSION "{colibri_engine.__version__}"' in header.read_text()


@pytest.mark.parametrize("package", ["gguf", "tokenizers"])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": ["a"],
                "tokenizer.ggml.token_type": [1]}  # fmt: skip
    path = write_gguf(tmp_path / "m.gguf", LLAMA, gguf_tensors(LLAMA, random_tensors(LLAMA)), metadata=metadata)
    monkeypatch.setitem(sys.modules, package, None)
    result = run(commands.convert, path, tmp_path / "dst")
    assert result.exit_code == 2
    assert "pip install 'colibri-daemon[convert]'" in result.stderr
