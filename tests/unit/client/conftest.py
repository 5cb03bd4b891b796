"""A short path for a socket, and clients whose back-off is short."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from colibri_client import AsyncClient
from colibri_client.retry import Policy
from colibri_client.session import Session, Settings


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="colibri-") as folder:
        yield Path(folder) / "s"


@pytest.fixture
def quick(path: Path) -> Callable[..., AsyncClient]:
    """AsyncClient with the given settings and, unless a policy is among them, a back-off of milliseconds."""

    def make(policy: Policy | None = None, **settings: Any) -> AsyncClient:
        client = AsyncClient(path)
        client._session = Session(str(path), Settings(policy or Policy(base=0.001, most=0.02), **settings))
        return client

    return make
