"""Lines to systemd's journal with fields of their own, by its native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL).

MESSAGE is the line as it would stand on stderr; each field of it is COLIBRI_<NAME> besides, so that
``journalctl COLIBRI_REQUEST_ID=…`` finds all lines of a request, of whichever process.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SOCKET = Path("/run/systemd/journal/socket")
_BESIDE = frozenset({"ts", "level", "pid", "msg"})  # the journal has these itself, and the line
_MOST = 64  # bytes of a field's name


def entry(line: str, priority: int, fields: Mapping[str, Any]) -> bytes:
    """A datagram."""
    named = {f"COLIBRI_{re.sub('[^A-Z0-9]', '_', key.upper())}"[:_MOST]: value
             for key, value in fields.items() if key not in _BESIDE and value is not None}  # fmt: skip
    told = {"MESSAGE": line, "PRIORITY": priority, "SYSLOG_IDENTIFIER": "colibrid", **named}
    return b"".join(_field(name, str(value)) for name, value in told.items())


def _field(name: str, value: str) -> bytes:
    data = value.encode("utf-8", "backslashreplace")
    if b"\n" not in data:
        return b"%s=%s\n" % (name.encode(), data)
    return b"%s\n%s%s\n" % (name.encode(), len(data).to_bytes(8, "little"), data)


class Journal:
    """The journal's socket. Sending never waits and never raises."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = str(path or SOCKET)
        self._sock: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def send(self, datagram: bytes) -> bool:
        """False if the journal did not take it: it is not there, it is full, the datagram is too long."""
        if self._sock is None:
            return False
        try:
            return self._sock.sendto(datagram, socket.MSG_NOSIGNAL, self._path) == len(datagram)
        except OSError:
            return False

    def close(self) -> None:
        """Nothing is sent any more. Idempotent."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
