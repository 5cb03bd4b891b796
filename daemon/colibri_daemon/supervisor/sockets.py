"""The listening socket: made, taken from systemd, refused, removed.

A path is bound only if nothing is there or what is there is the socket of a program that has died. Two daemons that
start at once on one path are kept apart by a lock on the *directory*, held from the look to the listen(): the later one
then finds a live socket. A lock file beside the socket would have to be left behind for ever (removing one is a race of
its own) and could be planted by others in a shared directory.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import socket
import stat
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..common.address import parse_address
from ..common.declaration import SOCKET_PATH_BYTES

PROBE_SECONDS = 0.5
LOCK_SECONDS = 2.0
BACKLOG = 512
FIRST_PASSED = 3  # SD_LISTEN_FDS_START


class SocketError(Exception):
    """The socket cannot be used; the message says why and what to do."""


@dataclass
class Listener:
    """A listening socket. identity: (device, inode) of its file if we made it, else None."""

    sock: socket.socket
    path: Path
    identity: tuple[int, int] | None

    def remove(self) -> None:
        """Takes the file away if we made it and it is still ours. Before close(), so that no path is left on which
        nobody answers."""
        with suppress(OSError):
            if self.identity is not None and _identity(self.path) == self.identity:
                self.path.unlink()

    def close(self) -> None:
        self.sock.close()


def listen(path: Path, mode: int, group: str | None, environ: MutableMapping[str, str]) -> Listener:
    """The socket systemd passed if it passed one, else a new one at ``path``. Raises SocketError."""
    passed = passed_socket(environ)
    if passed is not None:
        return Listener(passed, Path(passed.getsockname()), None)
    return bind(path, mode, group)


def passed_socket(environ: MutableMapping[str, str]) -> socket.socket | None:
    """The first listening Unix stream socket among LISTEN_FDS (the others may be for something else), if they are meant
    for this process. All passed descriptors are made close-on-exec; the variables are taken out of the environment."""
    pid, fds, _ = (environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()):
        return None
    try:
        count = int(fds)
    except ValueError:
        raise SocketError(f"LISTEN_FDS is {fds!r}; it must be a number") from None
    found = None
    for fd in range(FIRST_PASSED, FIRST_PASSED + count):
        os.set_inheritable(fd, False)
        if found is None and _is_unix_listener(fd):
            found = socket.socket(fileno=fd)
            found.setblocking(False)
    return found


def _is_unix_listener(fd: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return False
    sock = socket.socket(fileno=fd)
    try:
        accepts = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(accepts) and sock.family == socket.AF_UNIX and sock.type == socket.SOCK_STREAM
    finally:
        sock.detach()


def bind(path: Path, mode: int, group: str | None = None) -> Listener:
    """A new listening socket at ``path``. Raises SocketError."""
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_BYTES:
        raise SocketError(f"{path}: has {size} bytes; a Unix socket's path can have {SOCKET_PATH_BYTES}, choose a "
                          "shorter one")  # fmt: skip
    gid = _gid(group)
    try:
        with _locked(path.parent):
            _make_way(path)
            return _bind(path, mode, gid)
    except OSError as e:
        raise SocketError(f"{path}: cannot be made a socket: {e.strerror or e}{_remedy(e, path)}") from None


def listen_http(address: str, mode: int, group: str | None) -> Listener:
    """For metrics; see parse_address(). mode and group: of a Unix socket. Raises SocketError."""
    place = parse_address(address)
    if isinstance(place, Path):
        return bind(place, mode, group)
    sock = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind(place)
        sock.listen(BACKLOG)
    except OSError as e:
        sock.close()
        raise SocketError(f"{address}: cannot be listened on: {e.strerror or e}; choose another --metrics, or stop "
                          "what is there") from None
    return Listener(sock, Path(address), None)


def _bind(path: Path, mode: int, gid: int | None) -> Listener:
    """Rights are only ever widened: nobody but us until the group is right, and listen() comes last."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        previous = os.umask(0o777 & ~(mode & 0o600))  # the process has one thread
        try:
            sock.bind(os.fspath(path))
        finally:
            os.umask(previous)
        listener = Listener(sock, path, _identity(path))
    except BaseException:
        sock.close()
        raise
    try:
        if gid is not None:
            os.chown(path, -1, gid)
        os.chmod(path, mode)
        sock.listen(BACKLOG)
    except BaseException:
        listener.remove()
        listener.close()
        raise
    return listener


def _identity(path: Path) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _gid(group: str | None) -> int | None:
    if not group:
        return None
    try:
        return int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise SocketError(f"socket_group: there is no group {group!r}") from None


def _remedy(e: OSError, path: Path) -> str:
    if e.errno == errno.ENOENT:
        return f"; make the directory {path.parent} first, or choose another --socket"
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"; user {os.geteuid()} needs to be able to write in {path.parent}, or choose another --socket"
    return ""


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(fd, folder)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, folder: Path) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                message = f"{folder}: another program keeps this directory locked; is it starting too?"
                raise SocketError(message) from None
            time.sleep(0.01)


def _make_way(path: Path) -> None:
    """Removes a dead socket; refuses anything else that is there."""
    try:
        found = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    for test, name in ((stat.S_ISLNK, "a symbolic link"), (stat.S_ISDIR, "a directory"), (stat.S_ISREG, "a file")):
        if test(found):
            raise SocketError(f"{path}: is {name}; choose another --socket or remove it")
    if not stat.S_ISSOCK(found):
        raise SocketError(f"{path}: is not a socket; choose another --socket or remove it")
    reason = _alive(path)
    if reason:
        raise SocketError(f"{path}: {reason}; stop that program or choose another --socket")
    path.unlink()


def _alive(path: Path) -> str | None:
    """Why the socket must be left alone; None if nobody will ever answer there. Only a refused connection proves that:
    a full backlog or a missing permission means that somebody is there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return None
        except PermissionError:
            return "is a socket of another user"
        except OSError as e:
            return f"somebody listens there but does not answer ({e.strerror or e})"
    return "is in use by a running program"
