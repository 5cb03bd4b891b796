"""Telling systemd: sd_notify(3) in a few lines. Without NOTIFY_SOCKET nothing is sent."""

from __future__ import annotations

import array
import math
import os
import socket
from collections.abc import MutableMapping, Sequence


class Notifier:
    """Takes its variables out of the environment: only the supervisor may speak for the service. watchdog_seconds:
    within which systemd wants to hear WATCHDOG=1, by WatchdogSec; infinity if it does not."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        address = environ.pop("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        within, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        ours = within.isdigit() and int(within) > 0 and pid in ("", str(os.getpid()))
        self.watchdog_seconds = int(within) / 1e6 if ours else math.inf

    @property
    def listened_to(self) -> bool:
        """Whether there is a service manager."""
        return bool(self._address)

    def send(self, *, fds: Sequence[int] = (), **fields: object) -> bool:
        """READY=1, STATUS="…", with descriptors for FDSTORE=1. Never blocks and never fails: a service manager that is
        not there must not stop us. False: it is behind with its reading; another attempt may succeed."""
        if not self._address:
            return True
        message = os.fsencode("\n".join(f"{name}={value}" for name, value in fields.items()))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendmsg([message], rights, 0, self._address)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True
