"""Logits and greedy tokens of every architecture against Hugging Face transformers (tests/golden/logits).

Measured: the largest difference of a logit is about 5e-6; 5e-4 is what the project promises.
"""

from __future__ import annotations

import numpy as np
import pytest
from colibri_engine import Engine
from fixtures.models import LOGITS, Models, golden_arrays

ARCHITECTURES = sorted(folder.name for folder in LOGITS.iterdir() if folder.is_dir())
LOGIT_BAR = 5e-4
# (threads, chunk): the text in one step, token by token, in pieces that divide nothing, and on two threads.
WAYS = [(1, None), (1, 1), (1, 7), (2, None), (2, 7)]


def test_there_is_a_golden_of_every_architecture(models: Models) -> None:
    found = set()
    for name in ARCHITECTURES:
        with Engine.open(models.golden(name)) as engine:
            found.add(engine.info.architecture)
    assert found == {"mixtral", "llama"}


@pytest.mark.parametrize(("threads", "chunk"), WAYS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits(models: Models, name: str, threads: int, chunk: int | None) -> None:
    golden = golden_arrays(LOGITS / name)
    with Engine.open(models.golden(name), threads) as engine:
        logits = engine.logits(golden["input_ids"], chunk=chunk)
    assert logits.shape == golden["logits"].shape
    assert np.abs(logits - golden["logits"]).max() <= LOGIT_BAR


@pytest.mark.parametrize(("threads", "chunk"), WAYS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens(models: Models, name: str, threads: int, chunk: int | None) -> None:
    golden = golden_arrays(LOGITS / name)
    expected = golden["greedy_tokens"].tolist()
    with Engine.open(models.golden(name), threads) as engine:
        assert engine.generate(golden["greedy_prompt"], len(expected), chunk=chunk) == expected


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_with_half_precision_keys_and_values(models: Models, name: str) -> None:
    golden = golden_arrays(LOGITS / name)
    expected = golden["greedy_tokens"].tolist()
    with Engine.open(models.golden(name), kv_format="f16") as engine:
        assert engine.generate(golden["greedy_prompt"], len(expected)) == expected
