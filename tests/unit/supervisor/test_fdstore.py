"""What systemd is asked to keep, and what is made of what comes back."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from colibri_daemon.supervisor.fdstore import ADMIN, ARENA, CLIENTS, FdStore, PassedError, passed


class Told:
    """Plays the Notifier. busy: so many messages are not taken at first."""

    listened_to = True

    def __init__(self, busy: int = 0) -> None:
        self.messages: list[tuple[dict[str, Any], int]] = []
        self._busy = busy

    def send(self, *, fds: tuple[int, ...] = (), **fields: object) -> bool:
        if self._busy:
            self._busy -= 1
            return False
        for fd in fds:
            os.fstat(fd)
        self.messages.append((fields, len(fds)))
        return True


def memfd(text: bytes = b"x") -> int:
    fd = os.memfd_create("test")
    os.pwrite(fd, text, 0)
    return fd


def kept(name: str) -> tuple[dict[str, Any], int]:
    return {"FDSTORE": 1, "FDNAME": name, "FDPOLL": 0}, 1


def removed(name: str) -> tuple[dict[str, Any], int]:
    return {"FDSTOREREMOVE": 1, "FDNAME": name}, 0


def test_one_of_a_kind_is_kept():
    told, fds = Told(), [memfd(), memfd()]
    store = FdStore(told)
    store.keep(ARENA, fds[0])
    store.keep(CLIENTS, fds[0], "1-2")
    store.keep(ARENA, fds[1])
    store.drop(CLIENTS)
    store.drop(ADMIN)
    assert told.messages == [kept(ARENA), kept(f"{CLIENTS}.1-2"), removed(ARENA), kept(ARENA),
                             removed(f"{CLIENTS}.1-2")]  # fmt: skip
    for fd in fds:
        os.close(fd)  # they are still ours


def test_what_is_taken_stays_until_it_is_dropped_or_replaced():
    told, fd = Told(), memfd()
    store = FdStore(told, [("colibri.socket", 0), (f"{CLIENTS}.1-2", fd)])
    assert store.take(ADMIN) is None
    assert store.take(CLIENTS) == ("1-2", fd)
    assert store.take(CLIENTS) is None
    assert told.messages == []
    store.drop(CLIENTS)
    assert told.messages == [removed(f"{CLIENTS}.1-2")]
    os.close(fd)


def test_two_of_a_kind_are_none():
    """Their memory is free at once, whoever else has them open."""
    told, fd = Told(), memfd(b"x" * 100_000)
    assert FdStore(told, [(ARENA, os.dup(fd)), (ARENA, memfd())]).take(ARENA) is None
    assert told.messages == [removed(ARENA)] * 2
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


def test_a_manager_that_is_behind():
    """The order is kept, and so are the descriptors, although the caller has closed them."""
    told, fd = Told(busy=3), memfd()
    store = FdStore(told)
    store.keep(ARENA, fd)
    store.keep(ARENA, fd)
    os.close(fd)
    assert told.messages == []
    store.flush()
    store.flush()
    assert told.messages == [kept(ARENA), removed(ARENA), kept(ARENA)]


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, []),
        ({"LISTEN_PID": "1", "LISTEN_FDS": "1"}, []),
        ({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0"}, []),
    ],
)
def test_nothing_is_passed(environ, found):
    assert passed(environ) == found
    assert not any(name.startswith("LISTEN") for name in environ)


def test_a_nonsense_count():
    with pytest.raises(PassedError, match="LISTEN_FDS is 'many'; it must be a number"):
        passed({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many"})


def test_a_socket_that_is_given_up_refuses(tmp_path):
    """Although systemd still has it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ours, socket.socket(socket.AF_UNIX) as client:
        ours.bind(str(tmp_path / "s"))
        ours.listen()
        assert FdStore(Told(), [(ADMIN, os.dup(ours.fileno())), (ADMIN, memfd())]).take(ADMIN) is None
        with pytest.raises(ConnectionRefusedError):
            client.connect(str(tmp_path / "s"))
