"""The model's files as the supervisor keeps them: which change is noticed, which does no harm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from colibri_daemon.common.facts import FileFacts, ModelFacts
from colibri_daemon.supervisor.weights import WeightFiles
from fixtures.descriptors import descriptors
from supervised import FACTS

CONTENTS = {"manifest.json": b"{}", "dense.bin": bytes(5000), "experts.bin": bytes(9000)}


def seen(folder: Path) -> ModelFacts:
    """As the check would tell."""
    files = []
    for name in CONTENTS:
        fd = os.open(folder / name, os.O_RDONLY)
        files.append(FileFacts.of(name, fd))
        os.close(fd)
    return ModelFacts.from_wire(replace(FACTS, folder=str(folder), files=tuple(files)).to_wire())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in CONTENTS.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


@pytest.fixture
def weights(folder: Path) -> Iterator[WeightFiles]:
    opened = WeightFiles.open(seen(folder))
    yield opened
    opened.close()


def by_rename(folder: Path, name: str, data: bytes) -> None:
    (folder / "new").write_bytes(data)
    (folder / "new").rename(folder / name)


def test_files_that_are_left_alone(folder, weights):
    assert weights.changed() is None
    for name, data in CONTENTS.items():
        assert os.pread(weights.files[name], 1 << 20, 0) == data
    assert sorted(weights.fds) == sorted(weights.files.values())


def test_reading_and_renaming_are_no_changes(folder, weights):
    (folder / "dense.bin").read_bytes()
    (folder / "dense.bin").chmod(0o600)
    by_rename(folder, "dense.bin", b"other")
    (folder / "experts.bin").unlink()
    assert weights.changed() is None
    assert os.pread(weights.files["dense.bin"], 1 << 20, 0) == CONTENTS["dense.bin"]


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize(("change", "how"), [
    (lambda path: os.truncate(path, 1), "1 bytes instead of"),
    (lambda path: os.truncate(path, 100_000), "100000 bytes instead of"),
    (lambda path: os.utime(path, (1, 1)), "(written to)"),
], ids=["shorter", "longer", "as long"])  # fmt: skip
def test_a_change_in_place_is_named(folder, weights, name, change, how):
    change(folder / name)
    told = weights.changed()
    assert told is not None
    assert told.startswith(f"{folder / name} was changed in place")
    assert how in told
    assert "by rename, then reload" in told


@pytest.mark.parametrize("name", CONTENTS)
def test_what_is_opened_must_be_what_was_checked(folder, name):
    facts, before = seen(folder), descriptors()
    by_rename(folder, name, CONTENTS[name])
    with pytest.raises(ValueError, match=f"{name}: was replaced or changed while the model was checked"):
        WeightFiles.open(facts)
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        WeightFiles.open(facts)
    assert descriptors() == before


def test_closing_gives_the_descriptors_back(folder):
    before = descriptors()
    weights = WeightFiles.open(seen(folder))
    assert len(descriptors()) == len(before) + 3
    weights.close()
    assert descriptors() == before
