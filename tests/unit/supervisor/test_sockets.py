"""Socket hygiene: what is bound, with which rights, and what is refused."""

from __future__ import annotations

import fcntl
import grp
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from colibri_daemon.common.declaration import SOCKET_PATH_BYTES
from colibri_daemon.supervisor import sockets
from colibri_daemon.supervisor.fdstore import CLIENTS, FdStore
from colibri_daemon.supervisor.sockets import Listener, SocketError, bind
from test_fdstore import Told


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Short: pytest's own folders may leave too little of a socket's path."""
    assert len(os.fsencode(tmp_path)) < SOCKET_PATH_BYTES - 10
    return tmp_path / "s"


def closing(listener: Listener) -> None:
    listener.remove()
    listener.close()


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(path))
        except OSError:
            return False
        return True


def dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))


def test_bind_and_remove(path):
    listener = bind(path, 0o660)
    assert connects(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert list(path.parent.iterdir()) == [path]  # nothing else is left in the directory
    closing(listener)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_the_mode_does_not_depend_on_the_umask(path, mode, umask):
    previous = os.umask(umask)
    try:
        listener = bind(path, mode)
        assert os.umask(umask) == umask  # and is put back
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    closing(listener)


def test_rights_are_never_wider_than_asked(path, monkeypatch):
    """What the file's mode is at each step, taken from the real calls."""
    seen = []

    def record(name):
        real = getattr(os, name)

        def call(*args, **keywords):
            seen.append(stat.S_IMODE(path.stat().st_mode))
            return real(*args, **keywords)

        return call

    for name in ("chown", "chmod"):
        monkeypatch.setattr(os, name, record(name))
    closing(bind(path, 0o660, str(os.getgid())))
    assert seen == [0o600, 0o600]


def test_the_group(path):
    name = grp.getgrgid(os.getgid()).gr_name
    listener = bind(path, 0o660, name)
    assert path.stat().st_gid == os.getgid()
    closing(listener)
    with pytest.raises(SocketError, match="socket_group: there is no group 'no-such-group'"):
        bind(path, 0o660, "no-such-group")
    assert not path.exists()


def test_a_dead_socket_is_replaced(path):
    dead_socket(path)
    listener = bind(path, 0o660)
    assert connects(path)
    closing(listener)


def test_a_live_socket_is_refused_and_left_alone(path):
    first = bind(path, 0o660)
    with pytest.raises(SocketError, match="is in use by a running program; stop that program or choose another"):
        bind(path, 0o660)
    assert connects(path)
    closing(first)


def test_a_socket_with_a_full_backlog_is_alive(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as busy:
        busy.bind(str(path))
        busy.listen(0)
        clients = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(str(path))
        with pytest.raises(SocketError, match="somebody listens there but does not answer"):
            bind(path, 0o660)
        for client in clients:
            client.close()


def test_a_datagram_socket_is_alive(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(SocketError, match="somebody listens there"):
            bind(path, 0o660)
    assert path.exists()


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: path.write_text("precious"), "is a file"),
        (lambda path: path.mkdir(), "is a directory"),
        (lambda path: path.symlink_to("elsewhere"), "is a symbolic link"),
        (lambda path: os.mkfifo(path), "is not a socket"),
    ],
)
def test_anything_else_is_refused_and_left_alone(path, make, what):
    make(path)
    before = os.lstat(path)
    with pytest.raises(SocketError, match=rf"{path}: {what}; choose another --socket"):
        bind(path, 0o660)
    assert os.lstat(path) == before


def test_no_directory(tmp_path):
    with pytest.raises(SocketError, match=rf"No such file.*make the directory {tmp_path}/missing first"):
        bind(tmp_path / "missing" / "s", 0o660)


def test_a_file_for_a_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SocketError, match="Not a directory"):
        bind(tmp_path / "file" / "s", 0o660)


# Root may write anywhere, so the refusal is looked at as another user.
NOBODY = """
import os, sys
from pathlib import Path
from colibri_daemon.supervisor.sockets import SocketError, bind
if os.geteuid() == 0:
    os.setuid(65534)
try:
    bind(Path(sys.argv[1]), 0o660)
except SocketError as e:
    print(e)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_no_permission():
    run = subprocess.run([sys.executable, "-c", NOBODY, "/proc/s"], capture_output=True, text=True, check=True)
    assert "/proc/s: cannot be made a socket: " in run.stdout
    run = subprocess.run([sys.executable, "-c", NOBODY, "/colibri.s"], capture_output=True, text=True, check=True)
    assert "Permission denied; user" in run.stdout
    assert "needs to be able to write in /," in run.stdout


def test_the_longest_path(tmp_path):
    longest = tmp_path / ("x" * (SOCKET_PATH_BYTES - len(os.fsencode(tmp_path)) - 1))
    closing(bind(longest, 0o660))
    most = SOCKET_PATH_BYTES
    with pytest.raises(SocketError, match=rf"{most + 1} bytes; a Unix socket's path can have {most},"):
        bind(longest.with_name(longest.name + "x"), 0o660)


def test_starting_at_once_on_one_path(path):
    """Of many that race for a dead socket exactly one gets it, and it stays connectable."""
    for _ in range(20):
        dead_socket(path)
        barrier, won, lost = threading.Barrier(4), [], []

        def start(barrier=barrier, won=won, lost=lost):
            barrier.wait()
            try:
                won.append(bind(path, 0o660))
            except SocketError as e:
                lost.append(str(e))

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 3), lost
        assert connects(path)
        closing(won[0])


def test_a_locked_directory(path, monkeypatch):
    monkeypatch.setattr(sockets, "LOCK_SECONDS", 0.05)
    fd = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(SocketError, match="another program keeps this directory locked"):
        bind(path, 0o660)
    os.close(fd)
    closing(bind(path, 0o660))


def test_only_our_own_file_is_removed(path):
    listener = bind(path, 0o660)
    path.unlink()
    dead_socket(path)
    closing(listener)
    assert path.is_socket()
    path.unlink()
    listener = bind(path, 0o660)
    path.unlink()
    closing(listener)  # already gone is fine


# systemd's protocol: descriptors from 3 on, meant for LISTEN_PID.
ACTIVATED = """
import os, socket, sys
from pathlib import Path
from colibri_daemon.supervisor.fdstore import CLIENTS, FdStore, passed
from colibri_daemon.supervisor.notify import Notifier
from colibri_daemon.supervisor.sockets import listen
environ = dict(os.environ, LISTEN_PID=str(os.getpid() + int(sys.argv[1])), LISTEN_FDS="2", LISTEN_FDNAMES="a:b")
given = passed(environ)
listener = listen(Path(sys.argv[2]), 0o660, None, FdStore(Notifier({}), given), CLIENTS, given)
listener.remove()
print(listener.path, listener.sock.fileno(), os.get_inheritable(3), [name for name in environ if "LISTEN" in name])
"""


@pytest.mark.parametrize(("meant", "uses"), [(0, "passed"), (1, "made")])
def test_socket_activation(tmp_path, meant, uses):
    """Of two passed descriptors the listening Unix socket is taken, and its file is left to systemd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as passed, open(os.devnull) as other:
        passed.bind(str(tmp_path / "passed"))
        passed.listen()
        arrange = f"exec 8<&{other.fileno()} 9<&{passed.fileno()} 3<&8 4<&9; exec \"$@\""
        run = subprocess.run(
            ["bash", "-c", arrange, "-", sys.executable, "-c", ACTIVATED, str(meant), str(tmp_path / "made")],
            pass_fds=(other.fileno(), passed.fileno()), capture_output=True, text=True, check=True,
        )  # fmt: skip
    words = run.stdout.split()
    assert words[0] == str(tmp_path / uses)
    assert words[3:] == ["[]"]
    assert (tmp_path / "passed").exists()
    if uses == "passed":
        assert words[1:3] == ["4", "False"]


# ---- kept for the next life ------------------------------------------------------------------------------------------


class Lives:
    """Lives of a service on one store. Each gets what the one before has left."""

    def __init__(self, folder: Path) -> None:
        self.told = Told()
        self._folder = folder
        self._left: list[tuple[str, int]] = []

    def listen(self, name: str = "s", mode: int = 0o660, passed: Iterable[tuple[str, int]] = ()) -> Listener:
        store = FdStore(self.told, [(name, os.dup(fd)) for name, fd in self._left])
        listener = sockets.listen(self._folder / name, mode, None, store, CLIENTS, passed)
        if listener.identity is not None:
            device, inode = listener.identity
            self._left = [(f"{CLIENTS}.{device}-{inode}", os.dup(listener.sock.fileno()))]
        closing(listener)
        return listener


def test_who_waits_at_a_kept_socket_is_served_in_the_next_life(tmp_path):
    lives = Lives(tmp_path)
    lives.listen()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(tmp_path / "s"))
        client.sendall(b"hello")
        again = sockets.listen(tmp_path / "s", 0o600, None, FdStore(lives.told, lives._left), CLIENTS)
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600  # as configured now
        served, _ = again.sock.accept()
        assert served.recv(10) == b"hello"
        served.close()
    again.close()


@pytest.mark.parametrize("change", ["renamed", "replaced", "gone", "elsewhere"])
def test_a_kept_socket_that_nobody_would_find_is_replaced(tmp_path, change):
    lives, path = Lives(tmp_path), tmp_path / "s"
    first = lives.listen()
    if change != "elsewhere":
        path.rename(tmp_path / "t") if change == "renamed" else path.unlink()
    if change == "replaced":
        dead_socket(path)
    second = lives.listen("u" if change == "elsewhere" else "s")
    assert second.identity != first.identity
    assert connects(second.path)
    assert not connects(path) or change != "elsewhere"
    assert path.exists() == (change != "elsewhere")  # our old file is taken away
    assert [fields.get("FDSTOREREMOVE") for fields, _ in lives.told.messages] == [None, 1, None]


def test_a_socket_unit_comes_first(tmp_path):
    lives = Lives(tmp_path)
    lives.listen()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unit:
        unit.bind(str(tmp_path / "unit"))
        unit.listen()
        listener = lives.listen(passed=[("colibri.socket", os.dup(unit.fileno()))])
        assert listener.path == tmp_path / "unit"
        assert connects(tmp_path / "unit")
    assert not connects(tmp_path / "s")


# ---- for metrics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("address", "family"), [("127.0.0.1:{}", socket.AF_INET), ("[::1]:{}", socket.AF_INET6)])
def test_an_address_for_metrics(address, family):
    with socket.socket(family) as probe:
        probe.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        port = probe.getsockname()[1]
    listener = sockets.listen_http(address.format(port), 0o600, None)
    assert (listener.sock.family, listener.sock.getsockname()[1], listener.sock.getblocking()) == (family, port, False)
    with pytest.raises(sockets.SocketError, match=r"in use; choose another --metrics"):
        sockets.listen_http(address.format(port), 0o600, None)
    listener.remove()
    listener.close()
    sockets.listen_http(address.format(port), 0o600, None).close()  # at once, although connections may linger


def test_a_path_for_metrics(tmp_path):
    listener = sockets.listen_http(f"unix:{tmp_path}/m", 0o640, None)
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o640
    listener.remove()
    listener.close()
    assert not (tmp_path / "m").exists()


def test_an_address_that_is_not_ours():
    with pytest.raises(sockets.SocketError, match=r"192\.0\.2\.1:9464: cannot be listened on"):
        sockets.listen_http("192.0.2.1:9464", 0o600, None)
