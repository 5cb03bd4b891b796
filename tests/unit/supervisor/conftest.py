"""The supervisor as a service that a test starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from supervised import Service


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Service]]:
    running = []

    def make(worker: str = "serve", **settings: object) -> Service:
        running.append(Service(tmp_path, worker, **settings))
        return running[-1]

    yield make
    for service in running:
        service.close()
