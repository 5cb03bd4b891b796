"""Where to listen for HTTP: "127.0.0.1:9464", "[::1]:9464" or "unix:/run/colibri/metrics.sock"."""

from __future__ import annotations

import ipaddress
from pathlib import Path

UNIX = "unix:"
FORMS = "IPv4:port, [IPv6]:port or unix:path"


def parse_address(text: str) -> Path | tuple[str, int]:
    """A path, or a numeric host and a port. ValueError if it is neither. Names are refused: they may mean several
    addresses, and another one tomorrow."""
    if text.startswith(UNIX):
        path = text.removeprefix(UNIX)
        if not path or "\0" in path:
            raise ValueError(f"{text!r} has no path")
        return Path(path)
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{text!r} is not {FORMS}")
    try:
        bare = host.removeprefix("[").removesuffix("]")
        found = ipaddress.ip_address(bare)
    except ValueError:
        raise ValueError(f"{host!r} is no address in numbers; it must be {FORMS}") from None
    if (found.version == 6) != (host == f"[{bare}]"):
        raise ValueError(f"{text!r} is not {FORMS}")
    return bare, int(port)
