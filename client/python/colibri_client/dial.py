"""Finds the socket and makes a connection to it, handshake included; says in words why it cannot."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable

from .errors import ConnectionFailed, ConnectionLost
from .link import Link

DEFAULT_SOCKET = "/run/colibri/colibri.sock"
BUSY_SECONDS = 0.02  # between attempts while the daemon's queue of connections is full

REMEDIES: dict[int, str] = {
    errno.ENOENT: "there is no socket here; is the daemon running (colibrid serve), and is this its --socket?",
    errno.ENOTDIR: "there is no socket here; is the daemon running (colibrid serve), and is this its --socket?",
    errno.ECONNREFUSED: "nobody listens here; the daemon has ended, start it again (colibrid serve)",
    errno.EACCES: "permission denied; join the group that owns the socket (see ls -l), or ask its administrator",
    errno.EPERM: "permission denied; join the group that owns the socket (see ls -l), or ask its administrator",
    errno.ENOTSOCK: "this is not a socket; give the path of the daemon's --socket",
    errno.EPROTOTYPE: "this is a socket of another type than the daemon's; give the path of its --socket",
    errno.EAGAIN: "too many connections are waiting to be accepted here; try again later",
}


def socket_path(path: str | os.PathLike[str] | None) -> str:
    """The path given, else $COLIBRI_SOCKET, else the default."""
    return os.fspath(path) if path is not None else os.environ.get("COLIBRI_SOCKET") or DEFAULT_SOCKET


async def dial(path: str, make: Callable[[], Link], seconds: float) -> Link:
    """A welcomed link. ConnectionFailed, or RequestError if the server refuses the handshake."""
    try:
        async with asyncio.timeout(seconds):
            sock = await _connected(path)
    except TimeoutError:
        raise ConnectionFailed(path, REMEDIES[errno.EAGAIN]) from None
    _, link = await asyncio.get_running_loop().create_unix_connection(make, sock=sock)
    try:
        await _handshake(path, link, seconds)
    except BaseException:
        link.drop()
        await asyncio.shield(link.closed)
        raise
    return link


async def _handshake(path: str, link: Link, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await asyncio.shield(link.welcomed)
    except TimeoutError:
        raise ConnectionFailed(path, f"no answer within {seconds:g} s; is the daemon stopped or overloaded, or is this "
                                     "the socket of something else?") from None
    except ConnectionLost as e:
        raise ConnectionFailed(path, f"{e}, before it said WELCOME") from None


async def _connected(path: str) -> socket.socket:
    """A connected socket. On a Unix socket connect() never waits: it says EAGAIN instead."""
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect(path)
            return sock
        except BlockingIOError:
            sock.close()
            await asyncio.sleep(BUSY_SECONDS)
        except OSError as e:
            sock.close()
            reason = REMEDIES.get(e.errno or 0) or e.strerror or str(e)  # a path that is too long has no errno
            raise ConnectionFailed(path, reason) from None
        except BaseException:
            sock.close()
            raise
