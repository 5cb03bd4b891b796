"""Admission is pure: a message, the model and the peer in, a Job or a refusal out."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from colibri_daemon.common.kv import slabs_needed
from colibri_daemon.dispatcher.admission import OVERFLOW_UID, Admission, Capacity, foregone
from colibri_protocol.errors import Code, InvalidMessage
from colibri_protocol.messages import Cache, Generate, Resume, Score, TokenCheck
from dispatched import EOS, MAX_LEN, VOCAB, facts, ids
from hypothesis import given
from hypothesis import strategies as st

TRUSTED = 1000


def admission(capacity: Capacity | None = None, **changes: Any) -> Admission:
    made = Admission(facts(**changes), frozenset({TRUSTED}), lambda: 42)
    made.capacity = capacity
    return made


def refusal(message: Generate | Score | TokenCheck, uid: int = 1, **changes: Any) -> InvalidMessage:
    gate = admission(**changes)
    verb = {Generate: gate.generate, Score: gate.score, TokenCheck: gate.check}[type(message)]
    with pytest.raises(InvalidMessage) as caught:
        verb(message, uid)
    return caught.value


def place(error: InvalidMessage) -> tuple[Any, ...]:
    return error.code, error.field, error.index, error.limit


def test_everything_of_a_request_reaches_the_job() -> None:
    fields = {
        "max_tokens": 9, "min_tokens": 2, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {4: 1.5},
        "stop_ids": ids(8), "stop_seqs": (ids(6, 7),), "logprobs": 3, "prompt_logprobs": 2,
    }  # fmt: skip
    job = admission().generate(Generate(tokens=ids(1), seed=5, **fields), 1).job
    assert {name: getattr(job, name) for name in fields} == fields
    assert (job.tokens, job.seed, job.generated, job.eos_ids) == (ids(1), 5, b"", ids(EOS))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Generate(tokens=b""), (Code.PROMPT_EMPTY, "tokens", None, None)),
        (Generate(tokens=ids(0, VOCAB)), (Code.TOKEN_OUT_OF_RANGE, "tokens", 1, VOCAB - 1)),
        (Generate(tokens=ids(*[1] * MAX_LEN)), (Code.PROMPT_TOO_LONG, "tokens", None, MAX_LEN - 1)),
        (Generate(tokens=ids(*[1] * (MAX_LEN + 1)), max_tokens=0), (Code.PROMPT_TOO_LONG, "tokens", None, MAX_LEN)),
        (Generate(tokens=ids(1), stop_ids=ids(1, 2, VOCAB)), (Code.TOKEN_OUT_OF_RANGE, "stop_ids", 2, VOCAB - 1)),
        (Generate(tokens=ids(1), stop_seqs=(ids(1), ids(1, VOCAB))),
         (Code.TOKEN_OUT_OF_RANGE, "stop_seqs", 1, VOCAB - 1)),
        (Generate(tokens=ids(1), stop_seqs=(ids(1), b"")), (Code.INVALID_ARGUMENT, "stop_seqs", 1, None)),
        (Generate(tokens=ids(1), logit_bias={VOCAB: 1.0}), (Code.TOKEN_OUT_OF_RANGE, "logit_bias", VOCAB, VOCAB - 1)),
        (Generate(tokens=ids(1), min_tokens=3, max_tokens=2), (Code.INVALID_ARGUMENT, "min_tokens", None, 2)),
        (Generate(tokens=ids(1), resume=Resume(tokens=ids(1, 2)), max_tokens=1),
         (Code.INVALID_ARGUMENT, "resume.tokens", None, 1)),
        (Generate(tokens=ids(1), resume=Resume(tokens=ids(VOCAB))),
         (Code.TOKEN_OUT_OF_RANGE, "resume.tokens", 0, VOCAB - 1)),
        (Generate(tokens=ids(1), resume=Resume(tokens=b"", seed=1), seed=2),
         (Code.INVALID_ARGUMENT, "seed", None, None)),
        (Generate(tokens=ids(1), model="x"), (Code.MODEL_MISMATCH, "model", None, None)),
        (Generate(tokens=ids(1), tenant="x"), (Code.PERMISSION, "tenant", None, None)),
        (Score(tokens=ids(1)), (Code.INVALID_ARGUMENT, "from", None, 0)),
        (Score(tokens=ids(1, 2), start=2), (Code.INVALID_ARGUMENT, "from", None, 1)),
        (Score(tokens=b""), (Code.PROMPT_EMPTY, "tokens", None, None)),
        (Score(tokens=ids(1, VOCAB)), (Code.TOKEN_OUT_OF_RANGE, "tokens", 1, VOCAB - 1)),
        (TokenCheck(tokens=b""), (Code.PROMPT_EMPTY, "tokens", None, None)),
        (TokenCheck(tokens=ids(1), tenant="x"), (Code.PERMISSION, "tenant", None, None)),
    ],
)  # fmt: skip
def test_refusals_name_code_field_index_and_limit(message: Any, expected: tuple[Any, ...]) -> None:
    assert place(refusal(message)) == expected


def test_names_that_are_right_are_accepted() -> None:
    message = Generate(tokens=ids(1), model="made up", tenant="x")
    assert admission().generate(message, TRUSTED).job.tokens == ids(1)


def test_the_longest_prompts_that_fit() -> None:
    assert admission().generate(Generate(tokens=ids(*[1] * (MAX_LEN - 1))), 1).job.max_tokens == 1
    assert admission().generate(Generate(tokens=ids(*[1] * MAX_LEN), max_tokens=0), 1).job.max_tokens == 0
    assert admission().score(Score(tokens=ids(*[1] * MAX_LEN)), 1).job.score_from == 1


def test_the_seed_is_the_clients_or_the_first_attempts_or_drawn() -> None:
    def seed(**fields: Any) -> int:
        return admission().generate(Generate(tokens=ids(1), **fields), 1).job.seed

    assert seed() == 42
    assert seed(seed=0) == 0
    assert seed(resume=Resume(tokens=b"", seed=7)) == 7
    assert seed(resume=Resume(tokens=b"", seed=7), seed=7) == 7


def test_ignore_eos_leaves_no_eos() -> None:
    assert admission().generate(Generate(tokens=ids(1), ignore_eos=True), 1).job.eos_ids == b""


def salts(*requests: tuple[int, dict[str, Any]]) -> list[bytes]:
    return [admission().generate(Generate(tokens=ids(1), **fields), uid).job.salt for uid, fields in requests]


def test_only_the_same_user_tenant_and_extra_share() -> None:
    extra = {"cache": Cache(salt_extra=b"x")}
    different = [(1, {}), (2, {}), (1, extra), (TRUSTED, {}), (TRUSTED, {"tenant": ""}), (TRUSTED, {"tenant": "x"}),
                 (TRUSTED, {"tenant": "x"} | extra), (TRUSTED, extra), (TRUSTED, {"tenant": "xx"})]  # fmt: skip
    found = salts(*different)
    assert len(set(found)) == len(different)
    assert {len(salt) for salt in found} == {32}
    assert found == salts(*different)


def test_score_and_check_share_with_generate() -> None:
    [salt] = salts((7, {}))
    gate = admission()
    assert gate.score(Score(tokens=ids(1, 2)), 7).job.salt == salt
    assert gate.check(TokenCheck(tokens=ids(1)), 7)[0].salt == salt


@pytest.mark.parametrize(("uid", "use", "cache"), [(7, True, True), (7, False, False), (OVERFLOW_UID, True, False)])
def test_who_uses_the_cache(uid: int, use: bool, cache: bool) -> None:
    job = admission().generate(Generate(tokens=ids(1), cache=Cache(use=use)), uid).job
    assert (job.cache, job.salt == b"") == (cache, uid == OVERFLOW_UID)


def test_never_fits_tells_what_there_is() -> None:
    error = refusal(Generate(tokens=ids(1), max_tokens=60), capacity=Capacity(slabs=3, chunk=16))
    assert place(error) == (Code.NEVER_FITS, None, None, 3)
    assert admission(Capacity(slabs=4, chunk=16)).generate(Generate(tokens=ids(1), max_tokens=60), 1)


@given(prompt=st.integers(1, MAX_LEN), max_tokens=st.integers(0, 200), chunk=st.integers(8, 512))
def test_check_says_what_generate_does(prompt: int, max_tokens: int, chunk: int) -> None:
    capacity = Capacity(slabs=2, chunk=chunk)
    generate = Generate(tokens=ids(*[1] * prompt), max_tokens=max_tokens)
    check = TokenCheck(tokens=generate.tokens, max_tokens=max_tokens)
    most = min(max_tokens, MAX_LEN - prompt)
    slabs = slabs_needed(prompt + most, 0, 0, chunk, 16)
    if slabs > 2 or prompt == MAX_LEN and max_tokens:
        assert place(refusal(check, capacity=capacity)) == place(refusal(generate, capacity=capacity))
    else:
        job, needed = admission(capacity).check(check, 1)
        assert (job.tokens, job.max_tokens, needed) == (check.tokens, most, slabs)
        assert admission(capacity).generate(generate, 1).job.max_tokens == most


@given(st.lists(st.integers(0, 2 * VOCAB), min_size=1, max_size=MAX_LEN - 1))
def test_the_first_bad_token_is_named(tokens: list[int]) -> None:
    bad = next((i for i, token in enumerate(tokens) if token >= VOCAB), None)
    message = Generate(tokens=array("I", tokens).tobytes())
    if bad is None:
        assert admission().generate(message, 1).job.tokens == message.tokens
    else:
        assert refusal(message).index == bad


@pytest.mark.parametrize(
    ("fields", "generated", "answer"),
    [
        ({"max_tokens": 0}, (), ("length", None)),
        ({"max_tokens": 2}, (8,), None),
        ({"max_tokens": 2}, (8, 9), ("length", None)),
        ({"max_tokens": 9}, (8, EOS), ("stop", ("eos", EOS))),
        ({"max_tokens": 9, "ignore_eos": True}, (8, EOS), None),
        ({"max_tokens": 9, "stop_ids": ids(8)}, (9, 8), ("stop", ("id", 8))),
        ({"max_tokens": 9, "stop_ids": ids(8)}, (8, 9), None),
        ({"max_tokens": 9, "min_tokens": 2, "stop_ids": ids(8)}, (9, 8), None),
        ({"max_tokens": 0, "prompt_logprobs": 0}, (), None),
    ],
)
def test_what_is_over_before_it_begins(fields: dict[str, Any], generated: tuple[int, ...], answer: Any) -> None:
    message = Generate(tokens=ids(1), resume=Resume(tokens=ids(*generated)), **fields)
    admitted = admission().generate(message, 1)
    assert admitted.answer == foregone(admitted.job) == answer
