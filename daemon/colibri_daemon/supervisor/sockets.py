"""The listening socket: made, taken from systemd, refused, kept for the next life, removed.

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..common import log
from ..common.address import parse_address
from ..common.declaration import SOCKET_PATH_BYTES
from .fdstore import KINDS, FdStore, give_up, kind_of

PROBE_SECONDS = 0.5
LOCK_SECONDS = 2.0
BACKLOG = 512


class SocketError(Exception):
    """The socket cannot be used; the message says why and what to do."""


@dataclass
class Listener:
    """A listening socket. identity: (device, inode) of its file if we made it, else None. stays: it is kept for the
    next life of the service, and so is the file."""

    sock: socket.socket
    path: Path
    identity: tuple[int, int] | None
    stays: bool = False

    def remove(self) -> None:
        """Takes the file away if we made it and it is still ours. Before close(), so that no path is left on which
        nobody answers."""
        with suppress(OSError):
            if not self.stays and self.identity is not None and _identity(self.path) == self.identity:
                self.path.unlink()

    def close(self) -> None:
        self.sock.close()


def listen(path: Path, mode: int, group: str | None, store: FdStore, kind: str,
           passed: Iterable[tuple[str, int]] = ()) -> Listener:  # fmt: skip
    """What a .socket unit passed; else what the store kept, with the clients that wait there; else a new one at
    ``path``, which the store keeps. kind: of the store. Raises SocketError."""
    listener = _from_unit(passed)
    kept = _kept(path, store, kind, unwanted="a socket unit is used" if listener else "")
    if listener is not None:
        return listener
    listener = kept or bind(path, mode, group)
    assert listener.identity is not None
    if kept is None:
        store.keep(kind, listener.sock.fileno(), "-".join(map(str, listener.identity)))
    else:
        _permit(kept.path, mode, _gid(group))
    listener.stays = store.works
    return listener


def _from_unit(passed: Iterable[tuple[str, int]]) -> Listener | None:
    """The first listening Unix stream socket; the others may be for something else."""
    for name, fd in passed:
        if kind_of(name) not in KINDS and _is_unix_listener(fd):
            sock = _owned(fd)
            return Listener(sock, Path(sock.getsockname()), None)
    return None


def _kept(path: Path, store: FdStore, kind: str, unwanted: str) -> Listener | None:
    """From the store, if clients that come to ``path`` come to it."""
    if (taken := store.take(kind)) is None:
        return None
    detail, fd = taken
    try:
        if reason := unwanted or _unfit(path, fd, detail):
            raise SocketError(reason)
        return Listener(_owned(fd), path, _identity(path))
    except (OSError, SocketError) as e:
        log.get("supervisor").warning("the kept socket is not used", kind=kind, reason=str(e))
        store.drop(kind)
        give_up(fd)
    return None


def _unfit(path: Path, fd: int, detail: str) -> str:
    """Why a kept descriptor is not the socket of the file at ``path``, which was (device, inode) ``detail``."""
    if not _is_unix_listener(fd):
        return "it is no listening Unix socket"
    sock = socket.socket(fileno=fd)
    try:
        bound = sock.getsockname()
    finally:
        sock.detach()
    if bound != str(path):
        _remove_if(Path(bound), detail)
        return f"it was at {bound!r}, not {path}"
    if "-".join(map(str, _identity(path))) != detail:
        return f"another socket is at {path} by now"
    return ""


def _remove_if(path: Path, detail: str) -> None:
    """The file of a socket that is given up."""
    with suppress(OSError, ValueError):
        if "-".join(map(str, _identity(path))) == detail:
            path.unlink()


def _owned(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    return sock


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
        _permit(path, mode, gid)
        sock.listen(BACKLOG)
    except BaseException:
        listener.remove()
        listener.close()
        raise
    return listener


def _permit(path: Path, mode: int, gid: int | None) -> None:
    if gid is not None:
        os.chown(path, -1, gid)
    os.chmod(path, mode)


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
