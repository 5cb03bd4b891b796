"""Who may connect: lists of users and groups."""

from __future__ import annotations

import os
import socket

import pytest
from colibri_daemon.dispatcher.session import groups_of, peer_of
from colibri_protocol.errors import Code
from colibri_protocol.messages import Error
from dispatched import on_uvloop, rig

UID, GIDS = os.getuid(), tuple({os.getgid(), *os.getgroups()})
SOMEBODY = 4_000_000  # else


@pytest.mark.parametrize("settings", [
    {}, {"allowed_uids": (SOMEBODY, UID)}, {"allowed_gids": (SOMEBODY, GIDS[-1])},
    {"allowed_uids": (SOMEBODY,), "trusted_uids": (UID,)}, {"allowed_uids": (SOMEBODY,), "allowed_gids": GIDS},
])  # fmt: skip
@on_uvloop
async def test_let_in(settings: dict[str, tuple[int, ...]]) -> None:
    async with rig(**settings) as r:
        client = await r.client()
        assert (await client.stats()).counters['connections_total{result="accepted"}'] == 1


@pytest.mark.parametrize("settings", [
    {"allowed_uids": (SOMEBODY,)}, {"allowed_gids": (SOMEBODY,)},
    {"allowed_uids": (SOMEBODY,), "allowed_gids": (SOMEBODY,), "trusted_uids": (SOMEBODY,)},
])  # fmt: skip
@on_uvloop
async def test_turned_away(settings: dict[str, tuple[int, ...]]) -> None:
    async with rig(**settings) as r:
        client = await r.dial()
        error = await client.hear_a(Error)
        assert (error.code, error.retryable, error.retry_after_ms) == (Code.PERMISSION, False, None)
        assert "allowed_uids" in error.message
        await client.closed()
        counts = r.dispatcher.server.stats.numbers()
        assert counts['connections_total{result="refused_auth"}'] == 1
        assert counts['connections_total{result="accepted"}'] == 0


def test_the_groups_of_a_peer() -> None:
    """All it is in, whatever the order."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind("")  # an abstract name of the kernel's choice
        listener.listen()
        client.connect(listener.getsockname())
        with listener.accept()[0] as sock:
            assert groups_of(sock, peer_of(sock)) == set(GIDS)
