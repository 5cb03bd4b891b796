"""Telling systemd: sd_notify(3) in a few lines. Without NOTIFY_SOCKET nothing is sent."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress


class Notifier:
    """Takes NOTIFY_SOCKET out of the environment: only the supervisor may speak for the service."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        address = environ.pop("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def send(self, **fields: object) -> None:
        """READY=1, STATUS="…". Never blocks and never fails: a service manager that is not there must not stop us."""
        if not self._address:
            return
        message = "\n".join(f"{name}={value}" for name, value in fields.items())
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            sock.sendto(os.fsencode(message), self._address)
