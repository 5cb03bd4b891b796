"""What is made from the declaration of settings: CONFIG.md and the example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from colibri_daemon.common import reference
from colibri_daemon.common.declaration import SETTINGS, Settings
from colibri_daemon.common.settings import load_settings


def test_generated_files_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--check"]) == 0, capsys.readouterr().err


def test_check_tells_what_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    path = tmp_path / "folder" / "CONFIG.md"
    monkeypatch.setattr(reference, "FILES", {path: reference.markdown})
    assert reference.main(["--check"]) == 1
    assert str(path) in capsys.readouterr().err
    assert reference.main(["--write"]) == 0
    assert reference.main(["--check"]) == 0
    path.write_text("old")
    assert reference.main(["--check"]) == 1


def from_text(folder: Path, text: str) -> Settings:
    path = folder / "colibrid.toml"
    path.write_text(text)
    return load_settings({}, {}, path)


def test_the_example_holds_every_setting_at_its_default(tmp_path: Path) -> None:
    assert from_text(tmp_path, reference.example()).to_json() == Settings().to_json()
    uncommented = re.sub(r"(?m)^#(?=[a-z])", "", reference.example())
    loaded = from_text(tmp_path, uncommented)
    assert all(loaded.origin(name) != "default" for name in SETTINGS)
    named = {"model": None, "socket_group": None, "metrics": None}  # examples stand there
    assert loaded.model_copy(update=named).model_dump() == Settings().model_dump()


def test_the_reference_names_every_setting_once() -> None:
    shown = reference.markdown()
    for setting in SETTINGS.values():
        assert shown.count(f"| `{setting.name}`<br>`{setting.flag}`<br>`{setting.variable}` |") == 1
