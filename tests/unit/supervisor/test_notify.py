"""sd_notify against a socket that plays systemd."""

from __future__ import annotations

import os
import socket

import pytest
from colibri_daemon.supervisor.notify import Notifier


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_messages_arrive(kind, tmp_path):
    name = str(tmp_path / "notify") if kind == "path" else f"@colibri-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + name[1:] if name.startswith("@") else name)
        systemd.settimeout(5)
        environ = {"NOTIFY_SOCKET": name}
        Notifier(environ).send(READY=1, STATUS="serving")
        assert systemd.recv(100) == b"READY=1\nSTATUS=serving"
        assert environ == {}


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": "/nonexistent/notify"}, {"NOTIFY_SOCKET": "x" * 200}])
def test_nobody_there(environ):
    Notifier(environ).send(READY=1)


def test_a_manager_that_does_not_read(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        for _ in range(2000):  # more than any queue takes
            notifier.send(STATUS="x" * 100)
