"""Fixtures every test may use."""

from __future__ import annotations

import pytest
from fixtures.models import Models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Model containers, made once per session: see fixtures/models.py."""
    return Models(tmp_path_factory.mktemp("models"))
