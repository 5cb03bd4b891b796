"""Whom a changed log level concerns, now and later."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from colibri_daemon.supervisor.log_levels import LogLevels

TITLES = ("kvpool", "dispatcher", "worker 0", "worker 1")


class Child:
    """As much of one as is needed."""

    def __init__(self, title: str) -> None:
        self.role = SimpleNamespace(title=title)
        self.told: list[dict[str, Any]] = []

    def tell(self, message: dict[str, Any]) -> None:
        assert message["t"] == "log_level"
        self.told.append(message["level"])


@pytest.fixture(autouse=True)
def root_level() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


@pytest.mark.parametrize(("role", "concerned"), [
    (None, ["supervisor", *TITLES]),
    ("supervisor", ["supervisor"]),
    ("worker", ["worker 0", "worker 1"]),
    ("worker 1", ["worker 1"]),
    ("kvpool", ["kvpool"]),
])  # fmt: skip
def test_who_is_told(role, concerned):
    logging.getLogger().setLevel("INFO")
    children = [Child(title) for title in TITLES]
    answer = LogLevels().ask("debug", role, children)
    assert answer == {"ok": True, "error": "", "result": {"processes": concerned}}
    assert {child.role.title for child in children if child.told == ["debug"]} == {*concerned} - {"supervisor"}
    assert (logging.getLogger().level == logging.DEBUG) == ("supervisor" in concerned)


def test_a_role_that_is_not_there():
    levels = LogLevels()
    answer = levels.ask("debug", "worker 7", [Child(title) for title in TITLES])
    assert not answer["ok"]
    assert "role is 'worker 7'; there are dispatcher, kvpool, supervisor, worker 0, worker 1" in answer["error"]
    later = Child("worker 7")
    levels.tell(later)
    assert later.told == []


@pytest.mark.parametrize(("asked", "expected"), [
    ([("debug", None)], ["debug"]),
    ([("debug", "worker")], ["debug"]),
    ([("debug", "worker 1")], ["debug"]),
    ([("debug", "worker 0")], []),
    ([("debug", None), ("error", "worker")], ["error"]),
    ([("debug", "worker 1"), ("error", "worker")], ["error"]),
    ([("debug", "worker"), ("error", "worker 1")], ["error"]),
    ([("debug", "worker 1"), ("error", None)], ["error"]),
    ([("debug", "worker 1"), ("error", "worker 0")], ["debug"]),
])  # fmt: skip
def test_who_starts_later_is_told_what_was_asked_for_last(asked, expected):
    levels = LogLevels()
    for level, role in asked:
        levels.ask(level, role, [Child(title) for title in TITLES])
    later = Child("worker 1")
    levels.tell(later)
    assert later.told == expected
