"""What callers may pass: token ids in every form, every field of the messages, and what is refused by which name."""

from __future__ import annotations

import array
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from colibri_client import errors
from colibri_client.options import (
    CheckOptions,
    GenerateOptions,
    ScoreOptions,
    check_message,
    generate_message,
    pack,
    score_message,
)
from colibri_protocol.messages import Cache, Generate, Resume, Score, TokenCheck
from fixtures.scripted_server import pack as packed
from hypothesis import given
from hypothesis import strategies as st

IDS = [1, 2, 300, 2**32 - 1]
FORMS: dict[str, Any] = {
    "list": IDS,
    "tuple": tuple(IDS),
    "iterator": iter(IDS),
    "bytes": packed(IDS),
    "bytearray": bytearray(packed(IDS)),
    "memoryview": memoryview(packed(IDS)),
    "numpy u4": np.array(IDS, dtype="<u4"),
    "numpy i8": np.array(IDS, dtype=np.int64),
    "numpy big-endian": np.array(IDS, dtype=">u8"),
    "numpy strided": np.array([n for i in IDS for n in (i, 0)], dtype="<u4")[::2],
    "numpy scalars": [np.uint32(i) for i in IDS],
    "array": array.array("L", IDS),
}


@pytest.mark.parametrize("form", FORMS)
def test_token_ids_of_any_form(form: str) -> None:
    assert pack(FORMS[form]) == packed(IDS)


def test_small_integers_of_numpy_are_ids_not_bytes() -> None:
    assert pack(np.array([1, 2, 3, 4], dtype=np.uint8)) == packed([1, 2, 3, 4])
    assert pack(range(10_000)) == packed(list(range(10_000)))


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_all_ids(ids: list[int]) -> None:
    assert pack(ids) == pack(iter(ids)) == pack(packed(ids)) == pack(np.array(ids, dtype=np.uint32)) == packed(ids)


@pytest.mark.parametrize(("tokens", "error", "index", "message"), [
    ([1, -1], errors.TokenOutOfRange, 1, r"tokens\[1\] is -1"),
    ([2**32], errors.TokenOutOfRange, 0, r"tokens\[0\] is 4294967296"),
    (np.array([5, -7]), errors.TokenOutOfRange, 1, r"tokens\[1\] is -7"),
    ([1, True], errors.InvalidArgument, 1, r"tokens\[1\] is True"),
    ([1.0], errors.InvalidArgument, 0, r"tokens\[0\] is 1.0"),
    ([1, 2, "3"], errors.InvalidArgument, 2, r"tokens\[2\] is '3'"),
    ([None], errors.InvalidArgument, 0, r"tokens\[0\] is None"),
    ("text", errors.InvalidArgument, None, "tokens is str"),
    (7, errors.InvalidArgument, None, "tokens is int"),
    (b"12345", errors.InvalidArgument, None, "5 bytes"),
    (np.array([1.5]), errors.InvalidArgument, None, "an array of type 'd'"),
    (np.array([True]), errors.InvalidArgument, None, r"an array of type '\?'"),
    (np.array([[1, 2]]), errors.InvalidArgument, None, "2 dimensions"),
    ([], errors.PromptEmpty, None, "give at least one"),
])  # fmt: skip
def test_bad_token_ids_are_named(tokens: Any, error: type[Exception], index: int | None, message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        generate_message(tokens, {})
    assert isinstance(raised.value, errors.InvalidRequest)
    assert (raised.value.field, raised.value.index) == ("tokens", index)


def test_all_fields_of_generate() -> None:
    given: GenerateOptions = {
        "max_tokens": 9, "min_tokens": 1, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {np.int64(4): 1},
        "seed": 5, "stop_ids": [1], "stop_seqs": [[1, 2], np.array([3])], "ignore_eos": True, "logprobs": 2,
        "prompt_logprobs": 1, "priority": 3, "deadline_ms": 100, "cache": {"use": False, "salt_extra": b"x"},
        "resume": {"tokens": [7], "seed": 5}, "model": "tiny", "tenant": "t", "trace": "0", "echo_usage": True,
        "request_id": "r",
    }  # fmt: skip
    assert generate_message([1], given) == Generate(
        tokens=packed([1]), max_tokens=9, min_tokens=1, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1,
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3, logit_bias={4: 1.0}, seed=5,
        stop_ids=packed([1]), stop_seqs=(packed([1, 2]), packed([3])), ignore_eos=True, logprobs=2, prompt_logprobs=1,
        priority=3, deadline_ms=100, cache=Cache(use=False, salt_extra=b"x"),
        resume=Resume(tokens=packed([7]), seed=5), model="tiny", tenant="t", trace="0", echo_usage=True,
        request_id="r",
    )  # fmt: skip
    assert set(given) == names(Generate)


def names(message: Any) -> set[str]:
    return {spec.name for spec in message.SPECS} - {"tokens"}


def test_the_declared_keywords_are_the_fields() -> None:
    assert set(GenerateOptions.__annotations__) == names(Generate)
    assert set(ScoreOptions.__annotations__) == names(Score) - {"top", "start"}
    assert set(CheckOptions.__annotations__) == names(TokenCheck)


def test_none_means_not_given() -> None:
    assert generate_message([1], {"max_tokens": None, "cache": None}) == Generate(tokens=packed([1]))


@pytest.mark.parametrize(("options", "field", "index"), [
    ({"max_tokens": -1}, "max_tokens", None),
    ({"max_tokens": 2**63}, "max_tokens", None),
    ({"temperature": float("nan")}, "temperature", None),
    ({"top_p": 0}, "top_p", None),
    ({"seed": -1}, "seed", None),
    ({"stop_ids": [1, -1]}, "stop_ids", 1),
    ({"stop_seqs": [[1], [2.5]]}, "stop_seqs[1]", 0),
    ({"stop_seqs": [[1]] * 17}, "stop_seqs", None),
    ({"logit_bias": {1: float("inf")}}, "logit_bias", 1),
    ({"logit_bias": {True: 1.0}}, "logit_bias", None),
    ({"logit_bias": [1]}, "logit_bias", None),
    ({"resume": {"tokens": ["x"]}}, "resume.tokens", 0),
    ({"cache": {"use": 1}}, "cache.use", None),
    ({"logprobs": 21}, "logprobs", None),
])  # fmt: skip
def test_bad_fields_are_named(options: dict[str, Any], field: str, index: int | None) -> None:
    with pytest.raises(errors.InvalidRequest) as raised:
        generate_message([1], options)
    assert (raised.value.field, raised.value.index) == (field, index)


def test_a_misspelt_keyword() -> None:
    with pytest.raises(TypeError, match="no field 'max_token'; did you mean max_tokens?"):
        generate_message([1], {"max_token": 1})
    with pytest.raises(TypeError, match="GENERATE has no field 'tokens'"):
        generate_message([1], {"tokens": [2]})
    with pytest.raises(TypeError, match="SCORE has no field 'temperature'"):
        score_message([1, 2], 0, 1, {"temperature": 1})


def test_seeds() -> None:
    assert generate_message([1], {}).seed is None
    assert generate_message([1], {"temperature": 1, "seed": 0}).seed == 0
    assert generate_message([1], {"temperature": 1, "resume": Resume(tokens=b"", seed=8)}).seed == 8
    drawn = {generate_message([1], {"temperature": 1}).seed for _ in range(4)}
    assert len(drawn) == 4


def test_score_and_check() -> None:
    assert score_message([1, 2], 3, 1, {"priority": 1}) == Score(tokens=packed([1, 2]), top=3, priority=1)
    assert check_message([1], {"max_tokens": 3}) == TokenCheck(tokens=packed([1]), max_tokens=3)
    with pytest.raises(errors.InvalidArgument, match="from") as raised:
        score_message([1, 2], 0, 0, {})
    assert raised.value.field == "from"


def test_the_client_needs_neither_numpy_nor_the_daemon() -> None:
    code = "import sys, colibri_client; print([m for m in sys.modules if m.split('.')[0] in " \
           "('numpy', 'colibri_daemon', 'colibri_engine')])"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
