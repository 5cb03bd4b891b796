"""Settings that other processes read, and that are read again."""

from __future__ import annotations

import os

import pytest
from colibri_daemon.common.pages import Field, Page, make_pages
from colibri_daemon.common.settings import SETTINGS, Settings, SettingsError, load_settings

OTHER = {
    "model": "/a b/ü", "verify": "true", "socket": "/x", "socket_mode": "0600", "socket_group": "users", "workers": "3",
    "load_seconds": "1.25", "kv_bytes": "1000000", "kv_format": "f32", "pinned": "4", "window": "0",
    "slab_tokens": "128", "trusted_uids": "1,2", "max_frame": "2M", "log_level": "debug",
}  # fmt: skip


@pytest.mark.parametrize("values", [{}, {name: value for name, value in OTHER.items() if name != "pinned"}])
def test_another_process_reads_the_same(values):
    settings = load_settings(values, {})
    read = Settings.from_json(settings.to_json())
    assert read.model_dump() == settings.model_dump()


@pytest.mark.parametrize("name", [name for name in OTHER if name != "window"])
def test_each_kind_of_value_survives(name):
    settings = load_settings({name: OTHER[name]}, {})
    value = getattr(settings, name)
    assert value != SETTINGS[name].default
    assert getattr(Settings.from_json(settings.to_json()), name) == value


def test_again_reads_the_same_sources_as_they_are_now(tmp_path):
    file = tmp_path / "config"
    file.write_text("workers = 2\nmax_seqs = 3\n")
    environ = {"COLIBRI_MAX_SEQS": "4"}
    settings = load_settings({"threads": "1"}, environ, file)
    file.write_text("workers = 5\nmax_seqs = 6\n")
    environ["COLIBRI_MAX_SEQS"] = "7"
    again = settings.again()
    assert (again.threads, again.workers, again.max_seqs) == (1, 5, 7)
    assert again.origin("workers") == f"{file}:1"
    file.unlink()
    with pytest.raises(SettingsError, match="cannot be read"):
        again.again()


def test_settings_of_another_process_cannot_be_read_again():
    with pytest.raises(ValueError, match="not loaded here"):
        Settings.from_json(Settings().to_json()).again()


def test_a_page_is_reached_through_its_place():
    pages = make_pages(3)
    pages[1][Field.STEPS] = 7
    fd, index = pages[1].place
    other = Page.open(os.dup(fd), index)
    assert other[Field.STEPS] == 7
    other[Field.STEPS] = 8
    assert [page[Field.STEPS] for page in pages] == [0, 8, 0]
    os.close(other.place[0])
