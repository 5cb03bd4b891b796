"""Fixtures of the tests that start real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures import gateway, installed
from fixtures.daemon import Daemon
from fixtures.installed import Installation
from fixtures.models import Models


@pytest.fixture(scope="session")
def gateway_binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gateway.build(tmp_path_factory.mktemp("gateway"))


@pytest.fixture(scope="session")
def chat_model(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template."""
    return gateway.chat_model(models.tiny("q4"), tmp_path_factory.mktemp("chat") / "tiny-chat")


@pytest.fixture(scope="module")
def chat_daemon(chat_model: Path) -> Iterator[Daemon]:
    with Daemon(chat_model, workers=2, threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def chat_gateway(gateway_binary: Path, chat_daemon: Daemon) -> Iterator[gateway.Gateway]:
    with gateway.Gateway(gateway_binary, chat_daemon.socket) as running:
        yield running


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The result of make install, with the gateway if there is one: only to be looked at and copied."""
    try:
        built: Path | None = gateway.build(tmp_path_factory.mktemp("gateway"))
    except pytest.skip.Exception:
        built = None
    venv = installed.environment(tmp_path_factory.getbasetemp())
    made = Installation(tmp_path_factory.mktemp("installation"), venv, gateway=built)
    made.make("install")
    return made
