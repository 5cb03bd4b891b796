"""Models from open descriptors, and what becomes of a process whose weights are changed in place."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from colibri_engine import Engine, EngineError
from fixtures.models import Models

TEXT = list(range(1, 30))
NAMES = ("manifest.json", "dense.bin", "experts.bin")
# Opens the model of argv[1] with exit code 6, then cuts the file argv[2] short and computes.
VICTIM = """
import faulthandler, os, sys
from colibri_engine import Engine
if sys.argv[3:] == ["faulthandler"]:
    faulthandler.enable()
with Engine.open(sys.argv[1], fault_exit=6, threads=2) as engine:
    if sys.argv[2] == "nothing":
        os.kill(os.getpid(), 7)
    os.truncate(os.path.join(sys.argv[1], sys.argv[2]), 4096)
    engine.logits(range(1, 30))
"""


@pytest.fixture
def folder(models: Models, tmp_path: Path) -> Path:
    """A copy that may be spoiled."""
    return shutil.copytree(models.random({"hidden": 64, "experts": 4}, "f32"), tmp_path / "model")


@contextmanager
def opened(folder: Path) -> Iterator[dict[str, int]]:
    files = {name: os.open(folder / name, os.O_RDONLY) for name in NAMES}
    try:
        yield files
    finally:
        for fd in files.values():
            os.close(fd)


def replace(folder: Path, source: Path) -> None:
    """As an operator should: other files under the same names."""
    for name in NAMES:
        shutil.copyfile(source / name, folder / f"{name}.new")
        os.rename(folder / f"{name}.new", folder / name)


def test_open_files_outlive_their_names(models: Models, folder: Path) -> None:
    other = models.random({"hidden": 64, "experts": 4}, "f32", seed=1)
    with Engine.open(folder) as engine:
        expected = engine.logits(TEXT)
    with opened(folder) as files:
        replace(folder, other)
        with Engine.open(folder, files=files) as engine:
            assert (engine.logits(TEXT) == expected).all()
        os.unlink(folder / "manifest.json")
        with Engine.open(folder, files=files, populate=True) as engine:
            assert (engine.logits(TEXT) == expected).all()


def test_a_file_that_is_not_given_is_not_looked_for(folder: Path) -> None:
    with opened(folder) as files, pytest.raises(EngineError, match="experts.bin: is not among the open files"):
        Engine.open(folder, files={name: files[name] for name in NAMES[:2]})
    with pytest.raises(EngineError, match="manifest.json: cannot open: Bad file descriptor"):
        Engine.open(folder, files=dict.fromkeys(NAMES, 1 << 20))


def test_descriptors_stay_the_callers(folder: Path) -> None:
    with opened(folder) as files:
        with Engine.open(folder, files=files):
            pass
        assert all(os.fstat(fd).st_size for fd in files.values())


def victim(folder: Path, file: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", VICTIM, str(folder), file, *words], stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("words", [(), ("faulthandler",)], ids=["alone", "with faulthandler"])
@pytest.mark.parametrize("file", ["dense.bin", "experts.bin"])
def test_weights_cut_short_have_an_exit_code(folder: Path, file: str, words: tuple[str, ...]) -> None:
    ended = victim(folder, file, *words)
    assert ended.returncode == 6
    assert ended.stderr.startswith("colibri: a mapped weight file was cut short")
    assert ended.stderr.count("\n") == 1


def test_another_sigbus_is_as_before(folder: Path) -> None:
    assert victim(folder, "nothing").returncode == -signal.SIGBUS
    ended = victim(folder, "nothing", "faulthandler")
    assert ended.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in ended.stderr


def test_closing_ends_the_watch(folder: Path) -> None:
    """More engines than there are ranges, one after the other."""
    for _ in range(70):
        with Engine.open(folder, fault_exit=6):
            pass
