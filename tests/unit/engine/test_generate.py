"""engine_c/bench/generate.c, the usage sketch of colibri.h made a program: golden tokens and its errors."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import colibri_engine
import numpy as np
import pytest
from fixtures.models import LOGITS, Models, golden_arrays

ENGINE = Path(__file__).resolve().parents[3] / "engine_c"
LIBRARY = Path(colibri_engine.__file__).parent / "libcolibri.so.1"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, linked with the library the Python package uses."""
    out = tmp_path_factory.mktemp("generate") / "generate"
    command = [shutil.which("cc") or "gcc", "-std=c11", "-O1", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror",
               "-pthread", f"-I{ENGINE}/include", f"-I{ENGINE}", str(ENGINE / "bench" / "generate.c"),
               *map(str, (ENGINE / "host").glob("*.c")), str(LIBRARY), f"-Wl,-rpath,{LIBRARY.parent}", "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def run(program: Path, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, args)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["mixtral", "mixtral_tied_swa", "llama"])
def test_golden_tokens(models: Models, program: Path, name: str) -> None:
    golden = golden_arrays(LOGITS / name)
    done = run(program, models.golden(name), 24, *golden["greedy_prompt"])
    assert done.returncode == 0, done.stderr
    assert [int(token) for token in done.stdout.split()] == golden["greedy_tokens"].tolist()


def test_a_prompt_longer_than_a_step(models: Models, program: Path) -> None:
    folder = models.golden("mixtral")
    prompt = np.arange(600) * 7 % 384
    with colibri_engine.Engine(folder) as engine:
        expected = engine.generate(prompt, 3)
    assert [int(token) for token in run(program, folder, 3, *prompt).stdout.split()] == expected


@pytest.mark.parametrize(("args", "code", "reason"), [
    ([], 2, "usage"), (["{model}", 3], 2, "usage"), (["{model}", "x", 1], 2, "usage"), (["{model}", 0, 1], 2, "usage"),
    (["{model}", 1 << 40, 1], 2, "usage"), (["none", 3, 1], 1, "none/manifest.json"),
    (["{model}", 3, 384], 1, "384"), (["{model}", 3, -1], 1, "vocabulary"), (["{model}", 3, "1x"], 1, "vocabulary"),
])  # fmt: skip
def test_errors(models: Models, program: Path, args: list[object], code: int, reason: str) -> None:
    done = run(program, *(str(a).format(model=models.golden("llama")) for a in args))
    assert (done.returncode, done.stdout) == (code, "")
    assert reason in done.stderr


def test_output_that_cannot_be_written(models: Models, program: Path) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = [program, models.golden("llama"), "2", "1"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "cannot write" in done.stderr
