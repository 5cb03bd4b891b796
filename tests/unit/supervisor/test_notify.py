"""sd_notify against a socket that plays systemd."""

from __future__ import annotations

import math
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


def test_how_often_the_watchdog_is_to_be_fed():
    ours, theirs = str(os.getpid()), str(os.getppid())
    for environ, seconds in (({}, math.inf), ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": ours}, 3.0),
                             ({"WATCHDOG_USEC": "3000000"}, 3.0), ({"WATCHDOG_USEC": "0"}, math.inf),
                             ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": theirs}, math.inf),
                             ({"WATCHDOG_USEC": "soon"}, math.inf)):  # fmt: skip
        assert Notifier(environ).watchdog_seconds == seconds
        assert environ == {}


def test_descriptors_arrive_and_a_full_queue_is_told(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd, open(os.devnull) as file:
        systemd.bind(str(tmp_path / "notify"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        assert notifier.send(FDSTORE=1, FDNAME="x", fds=(file.fileno(),))
        text, fds, _, _ = socket.recv_fds(systemd, 100, 4)
        assert (text, os.path.sameopenfile(fds[0], file.fileno())) == (b"FDSTORE=1\nFDNAME=x", True)
        os.close(fds[0])
        assert not all(notifier.send(STATUS="x") for _ in range(10_000))
    assert notifier.send(STATUS="x")  # nobody is there any more: nothing to try again for
