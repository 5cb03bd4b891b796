"""Weights are in memory once, whoever uses them; what an Engine takes it gives back."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from colibri_engine import Engine, EngineError
from fixtures.descriptors import descriptors
from fixtures.models import Models

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc/<pid>/smaps")

TEXT = list(range(20))
# Opens a model, reads all of it, says so and waits until it is told to end.
WORKER = """
import sys
from colibri_engine import Engine
with Engine.open(sys.argv[1], populate=True) as engine:
    engine.logits(range(20))
    print("ready", flush=True)
    sys.stdin.read()
"""


def mapped(pid: int | str, folder: Path) -> dict[str, int]:
    """Sums over a process's mappings of the weights: bytes of Size, Rss, Pss, Private_Dirty ..."""
    sums: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            inside = line.endswith((f"{folder}/dense.bin", f"{folder}/experts.bin"))
        elif inside and rest[-1] == "kB":
            sums[name[:-1]] = sums.get(name[:-1], 0) + 1024 * int(rest[0])
    return sums


def worker(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", WORKER, str(folder)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture(scope="module")
def large(models: Models) -> Path:
    """22 MB."""
    return models.random({"vocab": 64, "hidden": 512, "inter": 1024, "experts": 3}, "f32")


def test_two_processes_share_the_weights(large: Path) -> None:
    size = sum((large / name).stat().st_size for name in ("dense.bin", "experts.bin"))
    with worker(large) as first:
        alone = mapped(first.pid, large)
        with worker(large) as second:
            both = [mapped(process.pid, large) for process in (first, second)]
    assert size > 20e6
    assert alone["Rss"] == pytest.approx(size, rel=0.02)
    assert alone["Pss"] == pytest.approx(size, rel=0.02)
    for sums in both:  # each counts half of every page
        assert sums["Rss"] == pytest.approx(size, rel=0.02)
        assert sums["Pss"] == pytest.approx(size / 2, rel=0.02)
        assert sums["Private_Dirty"] == sums["Anonymous"] == 0


def test_two_engines_of_one_process_share_the_weights(large: Path) -> None:
    with Engine.open(large, populate=True), Engine.open(large, populate=True):
        sums = mapped("self", large)
    assert sums["Pss"] == pytest.approx(sums["Rss"] / 2, rel=0.02)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_generating_does_not_grow(models: Models) -> None:
    with Engine.open(models.tiny("q8"), threads=2) as engine:
        for _ in range(3):
            engine.generate(TEXT, 20)
        before = resident()
        for _ in range(60):  # an arena each, of 1 MB
            engine.generate(TEXT, 20)
        assert resident() - before < 8e6


def test_closing_gives_everything_back(large: Path) -> None:
    with Engine.open(large, threads=2):
        pass
    gc.collect()
    before, tasks, files = resident(), threads(), descriptors()
    for _ in range(20):
        with Engine.open(large, threads=3, populate=True) as engine:
            engine.logits(TEXT)
            assert mapped("self", large)["Rss"] > 20e6
    del engine
    gc.collect()
    assert mapped("self", large) == {}
    assert (threads(), descriptors()) == (tasks, files)
    assert resident() - before < 20e6  # one engine's weights are more


def test_a_failed_open_gives_everything_back(large: Path) -> None:
    tasks, files = threads(), descriptors()
    for _ in range(20):
        with pytest.raises(EngineError, match="slab_tokens"):
            Engine.open(large, threads=3, slab_tokens=17)
    assert mapped("self", large) == {}
    assert (threads(), descriptors()) == (tasks, files)
