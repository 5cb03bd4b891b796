"""colibrid check-config, config-reference and completion."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from colibri_daemon.cli import main as colibrid
from colibri_daemon.common import reference
from colibri_daemon.common.declaration import SETTINGS
from colibri_daemon.completion import completion
from colibri_daemon.config_commands import check_config, config_reference
from colibri_engine.binding import lib
from fixtures.models import Models


def write(folder: Path, *lines: str) -> Path:
    path = folder / "colibrid.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def run(path: Path, *arguments: str, **environ: str) -> Result:
    clean = {name: None for name in os.environ if name.startswith("COLIBRI_")}
    result = CliRunner().invoke(check_config, [str(path), *arguments], env=clean | environ)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def report(path: Path, **environ: str) -> dict[str, Any]:
    result = run(path, "--json", **environ)
    assert result.stderr == ""
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["ok"] == (not found["problems"]) == (result.exit_code == 0)
    assert result.exit_code in (0, 2)
    return found


@pytest.fixture
def model(models: Models) -> Path:
    return models.tiny("q4")


def test_values_are_shown_with_their_source(tmp_path: Path) -> None:
    path = write(tmp_path, f'socket = "{tmp_path}/s"', "max_seqs = 8")
    result = run(path, COLIBRI_WORKERS="3")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert f"max_seqs = 8 # {path}:2" in lines
    assert "workers = 3 # COLIBRI_WORKERS" in lines
    assert "drain_seconds = 30 # default" in lines
    assert len(lines) == len(SETTINGS)
    assert result.stderr == "warning: model is not set: serve needs it in the file, as COLIBRI_MODEL or as --model\n"


def test_what_is_shown_is_a_configuration(tmp_path: Path) -> None:
    path = write(tmp_path, f'socket = "{tmp_path}/s"', "trusted_uids = [0, 5]", "pinned = 0", 'kv_bytes = "3M"')
    shown = run(path).stdout
    again = run(write(tmp_path, shown)).stdout
    assert [line.split("#")[0] for line in again.splitlines()] == [line.split("#")[0] for line in shown.splitlines()]


def test_all_problems_and_exit_code_2(tmp_path: Path) -> None:
    path = write(tmp_path, "workers = 0", "model = 5", "max_seq = 1")
    result = run(path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert [line.split(":")[2] for line in result.stderr.splitlines()] == ["3", "2", "1"]
    found = report(path)
    assert len(found["problems"]) == 3
    assert found["settings"] == {}


def test_a_missing_file(tmp_path: Path) -> None:
    assert "cannot be read" in report(tmp_path / "none")["problems"][0]


def test_the_memory_split(tmp_path: Path, model: Path) -> None:
    """Two workers, full attention: a request of 512 tokens is 8 slabs."""
    path = write(tmp_path, f'model = "{model}"', f'socket = "{tmp_path}/s"', "workers = 2", "threads = 1", "window = 0",
                 "max_seqs = 4", "kv_bytes = 0")  # fmt: skip
    found = report(path)
    memory, facts = found["memory"], found["model"]
    assert facts["max_len"] == facts["context"] == 512
    assert (memory["longest"], memory["slabs"], memory["fitting"]) == (8, 64, 8)
    assert memory["kv"] == 64 * memory["slab_bytes"]
    assert memory["weights"] == facts["weight_bytes"]
    assert found["threads"] == 1
    assert found["settings"]["model"] == {"value": str(model), "from": f"{path}:1"}
    memory = report(path, COLIBRI_KV_BYTES=str(20 * memory["slab_bytes"] + 1))["memory"]
    assert (memory["slabs"], memory["fitting"]) == (20, 2)
    shown = run(path).stdout
    for part in ("model: tiny, mixtral, q4, id ", "the whole text", "1 thread each", "64 slabs", "takes 8, 8 of them"):
        assert part in shown


def test_a_model_that_cannot_be_served(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "experts.bin").write_bytes(b"short")
    path = write(tmp_path, f'model = "{folder}"', f'socket = "{tmp_path}/s"')
    (problem,) = report(path)["problems"]
    assert problem.startswith(f"model: {folder}")
    (problem,) = report(path, COLIBRI_MODEL=str(tmp_path / "none"))["problems"]
    assert str(tmp_path / "none") in problem
    (problem,) = report(path, COLIBRI_MODEL=str(model), COLIBRI_PINNED="400", COLIBRI_WINDOW="400")["problems"]
    assert "512" in problem
    found = report(path, COLIBRI_MODEL=str(model), COLIBRI_KV_BYTES="1")
    assert "kv_bytes is 1" in found["problems"][0]
    assert found["model"]["name"] == "tiny"


def test_warnings_do_not_stop_it(tmp_path: Path, model: Path) -> None:
    cores = lib.colibri_host_threads()
    path = write(tmp_path, f'model = "{model}"', f'socket = "{tmp_path}/missing/s"', f"threads = {cores}",
                 "workers = 2", "window = 0", 'kv_bytes = "448K"')  # fmt: skip
    found = report(path, COLIBRI_WORKER="1")
    assert found["ok"]
    assert [warning.split(" ")[0] for warning in found["warnings"]] == ["COLIBRI_WORKER", "socket:", "workers", "a"]
    assert "COLIBRI_WORKERS" in found["warnings"][0]
    assert f"{tmp_path}/missing" in found["warnings"][1]
    assert f"2 x {cores} = {2 * cores}, more than the {cores} cores" in found["warnings"][2]
    assert "needs 8 slabs" in found["warnings"][3]
    too_much = report(path, COLIBRI_KV_BYTES="1024T")
    assert not too_much["ok"]
    assert "lower kv_bytes" in too_much["problems"][0]


def test_an_unknown_group(tmp_path: Path) -> None:
    path = write(tmp_path, f'socket = "{tmp_path}/s"', 'socket_group = "no such group"')
    assert report(path)["problems"] == [f"{path}:2: socket_group: there is no group 'no such group'"]
    assert report(path, COLIBRI_SOCKET_GROUP="12345")["ok"]


def test_config_reference() -> None:
    assert CliRunner().invoke(config_reference, []).stdout == reference.markdown()
    assert CliRunner().invoke(config_reference, ["--toml"]).stdout == reference.example()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_valid(shell: str) -> None:
    script = CliRunner().invoke(completion, [shell]).stdout
    assert "_COLIBRID_COMPLETE" in script
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(("words", "completed"), [
    ("colibrid check-", "check-config"),
    ("colibrid serve --max-s", "--max-seqs"),
    ("colibrid serve --kv-format f", "f16"),
])  # fmt: skip
def test_completion_completes(words: str, completed: str) -> None:
    """What the scripts ask colibrid itself."""
    environ = {"_COLIBRID_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = CliRunner().invoke(colibrid, [], env=environ, prog_name="colibrid")
    assert f"plain,{completed}" in result.stdout.splitlines()
