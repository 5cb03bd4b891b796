"""The form of a log line, whatever is in it."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from colibri_daemon.common import log
from hypothesis import given
from hypothesis import strategies as st

HEAD = ["ts", "level", "role", "pid", "name", "msg"]


def render(msg: str = "m", fields: dict[str, Any] | None = None, form: Any = log.json_line, priority: bool = False,
           exc_info: Any = None, args: Any = (), level: int = logging.INFO) -> bytes:  # fmt: skip
    """The line of one record."""
    reader, writer = os.pipe()
    handler = log.Handler(log.Output(writer), "worker 0", form, priority)
    record = logging.LogRecord("queue", level, "", 0, msg, args, exc_info)
    record.fields = fields or {}
    handler.emit(record)
    handler.close()
    os.close(writer)
    with open(reader, "rb") as pipe:
        return pipe.read()


# ---- the form of a line --------------------------------------------------------------------------------------------
def test_json_fields_in_order() -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    line = json.loads(render("request ended", {"id": 5, "finish": "stop", "ms": 1.5, "none": None}))
    assert list(line) == [*HEAD, "id", "finish", "ms", "none"]
    assert list(line.values())[1:] == [
        "info", "worker 0", os.getpid(), "queue", "request ended", 5, "stop", 1.5, None]  # fmt: skip
    assert line["ts"].endswith("Z")
    assert len(line["ts"]) == len("2025-01-31T12:00:00.000Z")
    assert before <= datetime.fromisoformat(line["ts"]) <= datetime.now(UTC)


def test_text() -> None:
    fields = {"id": 5, "path": "/a b", "quote": 'a"b', "empty": "", "ok": True, "rate": 1.5, "ids": [1, 2], "é": "é"}
    line = render("request ended", fields, log.text_line).decode()
    assert line[24:] == (
        f' info    worker 0[{os.getpid()}] queue: request ended id=5 path="/a b" quote="a\\"b" empty="" ok=True '
        'rate=1.5 ids="[1, 2]" é=é\n'
    )


def test_a_field_does_not_replace_the_head() -> None:
    line = json.loads(render("real", {"level": "x", "pid": 0, "ts": "x", "id": 1}))
    assert (line["level"], line["pid"], line["id"]) == ("info", os.getpid(), 1)


@pytest.mark.parametrize(("level", "priority"), [(10, 7), (20, 6), (30, 4), (40, 3), (50, 2)])
def test_the_journals_priority(level: int, priority: int) -> None:
    line = render(priority=True, level=level)
    assert line.startswith(f"<{priority}>{{".encode())
    assert render(priority=True, level=level, form=log.text_line).startswith(f"<{priority}>2".encode())


class Nasty:
    def __str__(self) -> str:
        raise RuntimeError("no text")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.just(Nasty())
    | st.text(st.characters(categories=("Cc", "Cs", "Zl", "Zp")), min_size=1),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=5,
)  # fmt: skip


@given(msg=st.text(), fields=st.dictionaries(st.text(), ANYTHING), form=st.sampled_from([log.json_line, log.text_line]))
def test_any_record_is_one_printable_line(msg: str, fields: dict[str, Any], form: Any) -> None:
    line = render(msg, fields, form)
    assert line.endswith(b"\n")
    assert len(line) <= log.LINE_BYTES
    assert line[:-1].decode().isprintable()
    if form is log.json_line:
        assert json.loads(line)["msg"] == msg


@pytest.mark.parametrize("form", [log.json_line, log.text_line])
@pytest.mark.parametrize("fill", ["x", "é", "\U0001f426", "\n", "\0", '"'])
@pytest.mark.parametrize("count", [1, 4, 30])
def test_long_values_are_cut(form: Any, fill: str, count: int) -> None:
    line = render("msg" + fill * 5000, {f"f{i}": fill * 5000 for i in range(count)}, form)
    assert 100 < len(line) <= log.LINE_BYTES
    assert line.count(b"\n") == 1
    assert b"truncated" in line
    if form is log.json_line:
        assert json.loads(line)["msg"].startswith("msg")


def test_a_bad_value_spares_the_others() -> None:
    line = json.loads(render("m", {"bad": Nasty(), "nan": float("nan"), "id": 7}))
    assert line["msg"] == "m"
    assert (line["bad"], line["nan"], line["id"]) == ("<Nasty>", "nan", "7")


def test_other_libraries_records() -> None:
    assert json.loads(render("%s of %d", args=("one", 2)))["msg"] == "one of 2"
    assert json.loads(render("%d", args=("no number",)))["msg"] == "%d"


def test_an_exceptions_end_survives() -> None:
    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise ValueError("the reason")

    try:
        deep(200)
    except ValueError:
        line = render("failed", {"id": 1}, exc_info=sys.exc_info())
    told = json.loads(line)
    assert told["exc"].endswith("ValueError: the reason")
    assert told["id"] == 1
