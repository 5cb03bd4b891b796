"""The golden vectors, read by Python. client/go/vectors_test.go reads the same file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from colibri_protocol.codec import decode, encode
from colibri_protocol.errors import Code, ConnectionFault, ProtocolError
from colibri_protocol.framing import Framer
from colibri_protocol.limits import MAX_FRAME
from colibri_protocol.message import MESSAGES
from fixtures.wire import from_json, to_json

PATH = Path(__file__).parents[2] / "golden" / "protocol" / "vectors.json"
VECTORS = json.loads(PATH.read_text(encoding="utf-8"))


def named(group: str) -> Any:
    return pytest.mark.parametrize("vector", [pytest.param(v, id=v["name"]) for v in VECTORS[group]])


def read(data: bytes) -> tuple[Any, int]:
    (payload,) = Framer(MAX_FRAME).feed(data)
    return decode(payload)


@named("messages")
def test_bytes_mean_the_fields_and_the_fields_make_the_bytes(vector: dict[str, Any]) -> None:
    message, request_id = read(bytes.fromhex(vector["hex"]))
    assert (message.TAG, request_id) == (vector["tag"], vector["id"])
    assert message == from_json(MESSAGES[vector["tag"]], vector["fields"])
    assert to_json(message) == vector["fields"]
    assert encode(message, request_id).hex() == vector["hex"]


@named("refused")
def test_bytes_are_refused_for_the_stated_reason(vector: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as raised:
        read(bytes.fromhex(vector["hex"]))
    error = raised.value
    assert (error.code, isinstance(error, ConnectionFault)) == (Code[vector["code"]], vector["fault"])
    if not vector["fault"]:
        assert (error.field, error.index) == (vector["field"], vector["index"])
        assert error.message.startswith(vector["field"])


def test_every_message_has_a_vector_without_and_one_with_all_fields() -> None:
    by_tag: dict[int, list[set[str]]] = {tag: [] for tag in MESSAGES}
    for vector in VECTORS["messages"]:
        by_tag[vector["tag"]].append(set(read(bytes.fromhex(vector["hex"]))[0].to_body()))
    for tag, sent in by_tag.items():
        made = MESSAGES[tag]
        assert {spec.wire for spec in made.REQUIRED} in sent, f"{made.NAME}: no minimal vector; run record.py"
        assert set(made.BY_WIRE) in sent, f"{made.NAME}: no vector with all fields; run record.py"


def test_names_of_vectors_are_unique() -> None:
    for group in VECTORS.values():
        assert max(Counter(v["name"] for v in group).values()) == 1
