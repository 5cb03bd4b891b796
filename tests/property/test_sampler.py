"""The C sampler against its definition in numpy (tests/reference/sampler.py): the same token for every request."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from colibri_engine import Engine, EngineError
from colibri_engine._colibri import lib
from colibri_engine.binding import Sample, Sampling
from fixtures.models import Models
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import sampler as reference

VOCABS = (1, 7, 40, 300)
EXAMPLES, MANY_EXAMPLES = 300, int(os.environ.get("COLIBRI_EXAMPLES", 5000))  # the latter under `-m full`
# The reference uses numpy's exp and log, the engine its own; both are rounded to float32 at the end.
LOGPROB_BAR = 1e-5


@pytest.fixture(scope="module")
def engines(models: Models) -> Iterator[dict[int, Engine]]:
    """An engine per vocabulary size; what is behind the vocabulary does not matter to the sampler."""
    small = {"hidden": 8, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 4, "inter": 8, "experts": 1}
    opened = {vocab: Engine.open(models.random(small | {"vocab": vocab})) for vocab in VOCABS}
    yield opened
    for engine in opened.values():
        engine.close()


# ---- strategies ------------------------------------------------------------------------------------------------------


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


@st.composite
def logit_rows(draw: st.DrawFn, vocab: int) -> np.ndarray:
    """Values from a few levels (many exact ties), normal ones, or extremes that overflow after a penalty."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["ties", "normal", "narrow", "extreme"]))
    if kind == "ties":
        return rng.integers(-3, 4, vocab).astype(np.float32) / np.float32(2)
    row = rng.standard_normal(vocab).astype(np.float32)
    return row * np.float32({"normal": 4, "narrow": 1e-3, "extreme": 1e37}[kind])


def ids(vocab: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, vocab - 1), max_size=most)


@dataclass(frozen=True)
class Request:
    vocab: int
    logits: np.ndarray
    position: int
    prompt: list[int]
    generated: list[int]
    parameters: dict[str, Any]
    logprobs: int


@st.composite
def requests(draw: st.DrawFn) -> Request:
    vocab = draw(st.sampled_from(VOCABS))
    options = {
        "temperature": st.one_of(st.sampled_from([0.0, 9e-6, 1e-5, 1.0]), floats(0, 5)),
        "top_k": st.integers(0, vocab + 3),
        "top_p": st.one_of(st.sampled_from([1.0, 0.5, 2.0**-20]), floats(2.0**-20, 1)),
        "min_p": st.one_of(st.sampled_from([0.0, 1.0, 0.25]), floats(0, 1)),
        "repetition_penalty": floats(0.125, 8),
        "presence_penalty": floats(-3, 3),
        "frequency_penalty": floats(-3, 3),
        "seed": st.integers(0, 2**64 - 1),
        "logit_bias": st.dictionaries(st.integers(0, vocab - 1), floats(-100, 100), max_size=6),
        "allowed": st.frozensets(st.integers(0, vocab - 1)),
    }
    chosen = draw(st.fixed_dictionaries({}, optional=options))
    position = draw(st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1)))
    return Request(vocab, draw(logit_rows(vocab)), position, draw(ids(vocab, 12)), draw(ids(vocab, 12)), chosen,
                   draw(st.integers(0, 20)))  # fmt: skip


# ---- one request to both ---------------------------------------------------------------------------------------------


def expected_token(r: Request) -> int | type[Exception]:
    own = dict(r.parameters) | {"position": r.position, "prompt": r.prompt, "generated": r.generated}
    allowed, bias = own.pop("allowed", None), own.pop("logit_bias", {})
    mask = None if allowed is None else np.isin(np.arange(r.vocab), list(allowed))
    try:
        return reference.sample(r.logits, reference.Sampling(bias=bias, allowed=mask, **own))
    except (reference.NonFiniteError, reference.NoTokenError) as e:
        return type(e)


ERRORS = {lib.COLIBRI_NON_FINITE: reference.NonFiniteError, lib.COLIBRI_NO_TOKEN: reference.NoTokenError}


def engine_sample(engine: Engine, r: Request) -> Sample | type[Exception]:
    prompt, generated = (np.array(x, dtype=np.uint32) for x in (r.prompt, r.generated))
    try:
        return engine.sample(r.logits, Sampling(logprobs=r.logprobs, **r.parameters), r.position, prompt, generated)
    except EngineError as e:
        return ERRORS[e.status]


def check_request(engines: dict[int, Engine], r: Request) -> None:
    got, expected = engine_sample(engines[r.vocab], r), expected_token(r)
    if not isinstance(expected, int):
        assert got is expected
        return
    assert isinstance(got, Sample)
    assert got.token == expected
    logprobs = reference.log_probabilities(r.logits)
    assert got.logprob == pytest.approx(logprobs[expected], rel=1e-6, abs=LOGPROB_BAR)
    best = reference.best(r.logits, min(r.logprobs, r.vocab))
    assert [token for token, _ in got.top] == best
    assert [value for _, value in got.top] == pytest.approx(logprobs[best].tolist(), rel=1e-6, abs=LOGPROB_BAR)


@settings(max_examples=EXAMPLES, deadline=None)
@given(request=requests())
def test_tokens_and_log_probabilities(engines: dict[int, Engine], request: Request) -> None:
    check_request(engines, request)


@pytest.mark.full
@settings(max_examples=MANY_EXAMPLES, deadline=None)
@given(request=requests())
def test_tokens_and_log_probabilities_of_many_requests(engines: dict[int, Engine], request: Request) -> None:
    check_request(engines, request)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), vocab=st.sampled_from(VOCABS), count=st.integers(0, 20))
def test_score_is_the_log_softmax(engines: dict[int, Engine], data: st.DataObject, vocab: int, count: int) -> None:
    row = data.draw(logit_rows(vocab))
    token = data.draw(st.integers(0, vocab - 1))
    scored = engines[vocab].score(row, token, count)
    logprobs = reference.log_probabilities(row)
    assert scored.token == token
    assert scored.logprob == pytest.approx(logprobs[token], rel=1e-6, abs=LOGPROB_BAR)
    assert [t for t, _ in scored.top] == reference.best(row, min(count, vocab))


# ---- noise -----------------------------------------------------------------------------------------------------------

FLAT = np.zeros(300, dtype=np.float32)


def draws(engine: Engine, sampling: Sampling, count: int, logits: np.ndarray = FLAT) -> list[int]:
    """The tokens at positions 0 to count - 1."""
    return [engine.sample(logits, sampling, position).token for position in range(count)]


def test_noise_is_a_function_of_seed_and_position(engines: dict[int, Engine]) -> None:
    engine, hot = engines[300], Sampling(temperature=1, seed=5)
    forward = draws(engine, hot, 50)
    assert forward == draws(engine, hot, 50)
    assert forward[::-1] == [engine.sample(FLAT, hot, position).token for position in reversed(range(50))]
    assert len(set(forward)) > 30  # positions differ
    for seed in (6, 5 + 2**32):
        other = draws(engine, Sampling(temperature=1, seed=seed), 50)
        assert sum(a == b for a, b in zip(forward, other, strict=True)) < 5


def chi_square(tokens: list[int], probabilities: np.ndarray) -> tuple[float, int]:
    """(statistic, degrees of freedom); tokens expected fewer than 5 times are one class."""
    counts = np.bincount(tokens, minlength=len(probabilities)).astype(float)
    wanted = probabilities * len(tokens)
    rare = wanted < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    if wanted[-1] == 0:
        assert counts[-1] == 0
        counts, wanted = counts[:-1], wanted[:-1]
    return float(((counts - wanted) ** 2 / wanted).sum()), len(counts) - 1


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(engines: dict[int, Engine], temperature: float) -> None:
    row = np.random.default_rng(1).standard_normal(40).astype(np.float32)
    tokens = draws(engines[40], Sampling(temperature=temperature, seed=11), 4000, row)
    statistic, freedom = chi_square(tokens, softmax(row / temperature))
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)  # the seed is fixed: a test of this one stream


def test_draws_follow_what_top_k_and_top_p_leave(engines: dict[int, Engine]) -> None:
    row = np.random.default_rng(2).standard_normal(40).astype(np.float32)
    order = np.argsort(-row)
    left = order[:10][: int(np.argmax(np.cumsum(softmax(row)[order[:10]]) >= 0.8 * softmax(row)[order[:10]].sum())) + 1]
    expected = np.zeros(40)
    expected[left] = softmax(row[left])
    tokens = draws(engines[40], Sampling(temperature=1, top_k=10, top_p=0.8, seed=3), 4000, row)
    statistic, freedom = chi_square(tokens, expected)
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0), ("temperature", math.nan), ("temperature", math.inf),
        ("top_p", 1.5), ("top_p", -0.5), ("min_p", 1.5), ("min_p", -0.1), ("min_p", math.nan),
        ("repetition_penalty", -1.0), ("presence_penalty", math.nan), ("frequency_penalty", math.inf),
        ("logprobs", 21), ("logit_bias", {300: 1.0}), ("logit_bias", {0: math.nan}),
    ],
)  # fmt: skip
def test_parameters_out_of_range_are_named(engines: dict[int, Engine], field: str, value: Any) -> None:
    with pytest.raises(EngineError, match="bias" if field == "logit_bias" else field):
        engines[300].sample(FLAT, Sampling(**{field: value}), 0)


def test_no_allowed_token_and_infinite_logits_are_errors(engines: dict[int, Engine]) -> None:
    with pytest.raises(EngineError) as caught:
        engines[300].sample(FLAT, Sampling(allowed=frozenset()), 0)
    assert caught.value.status == lib.COLIBRI_NO_TOKEN
    for bad in (np.nan, np.inf, -np.inf):
        row = FLAT.copy()
        row[299] = bad
        with pytest.raises(EngineError) as caught:
            engines[300].sample(row, Sampling(), 0)
        assert caught.value.status == lib.COLIBRI_NON_FINITE


def test_ids_outside_the_vocabulary_are_refused(engines: dict[int, Engine]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        engines[300].sample(FLAT, Sampling(allowed=frozenset([300])), 0)
    with pytest.raises(EngineError, match="prompt"):
        engines[300].sample(FLAT, Sampling(repetition_penalty=1.5), 0, prompt=np.array([300], dtype=np.uint32))
    with pytest.raises(EngineError):
        engines[300].score(FLAT, 300)
