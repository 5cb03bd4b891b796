"""The dispatcher as a process of its own: how it begins and ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dispatched
import pytest
from colibri_daemon.common import ipc
from colibri_daemon.common.exit_codes import Exit
from colibri_protocol.connection import Connection, Role
from colibri_protocol.messages import Hello

Started = tuple[subprocess.Popen[bytes], socket.socket, Path]


@pytest.fixture
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """The process, its control socket and the path it listens on."""
    path = tmp_path_factory.mktemp("d") / "s"
    ours, theirs = ipc.control()
    ours.setblocking(True)
    ours.settimeout(20)
    with ours, theirs, socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as admin:
        for sock, name in ((listener, "s"), (admin, "s.admin")):
            sock.bind(str(path.with_name(name)))
            sock.listen()
        fds = (listener.fileno(), admin.fileno(), theirs.fileno())
        process = subprocess.Popen([sys.executable, dispatched.__file__, *map(str, fds)], pass_fds=fds)
        theirs.close()
        try:
            assert ipc.receive_control(ours) == ({"t": "ready"}, [])
            yield process, ours, path
        finally:
            process.kill()
            process.wait()


def test_sigterm_tells_clients_and_ends_with_0(started: Started) -> None:
    process, _, path = started
    conn = Connection(Role.CLIENT)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(str(path))
        client.sendall(conn.send(Hello(proto_min=1, proto_max=1)))
        assert [event.message.NAME for event in conn.receive(client.recv(4096))] == ["WELCOME"]
        process.send_signal(signal.SIGTERM)
        assert [event.message.NAME for event in conn.receive(client.recv(4096))] == ["GOAWAY"]
        assert process.wait(20) == Exit.STOPPED
        assert client.recv(1) == b""


def test_it_does_not_outlive_the_supervisor(started: Started) -> None:
    process, control, _ = started
    control.close()
    assert process.wait(20) == Exit.INTERNAL
