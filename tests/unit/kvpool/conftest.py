"""A KV pool with two workers."""

from __future__ import annotations

import pytest
from pooled import A, B, Peers


@pytest.fixture
def peers() -> Peers:
    made = Peers()
    made.join(A)
    made.join(B)
    return made
