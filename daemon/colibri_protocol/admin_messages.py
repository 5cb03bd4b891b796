"""Messages of the admin socket. Each is answered by one ADMIN_REPLY with its request id; on the client socket they are
refused with PERMISSION."""

from __future__ import annotations

from .kinds import U32, Blob, Flag, Int, Text
from .message import CLIENT, SERVER, message, optional, required

MAX_RESULT = (1 << 20) - 4096  # bytes: fits into a frame of the default size


@message(32, "ADMIN_DRAIN", CLIENT)
class AdminDrain:
    """Take no new requests, tell clients GOAWAY, end what is left after drain_seconds; stay up, not ready."""


@message(33, "ADMIN_RESUME", CLIENT)
class AdminResume:
    """Take requests again after ADMIN_DRAIN. Clients that were told GOAWAY have to connect anew."""


@message(34, "ADMIN_RELOAD", CLIENT)
class AdminReload:
    """Read the configuration and the model again and go over to them; answered when that is done or has failed."""

    everything: bool = optional(Flag(), "Replace dispatcher and KV pool too, even if nothing about them is new.", False)


@message(35, "ADMIN_EVICT", CLIENT)
class AdminEvict:
    """Drop cached prefixes. What running requests hold stays until they end, but is found by no other."""

    uid: int | None = optional(Int(0, U32), "Whose; absent: everybody's.")
    tenant: str | None = optional(Text(128), "Of that user, only this tenant's; absent: what belongs to no tenant.")


@message(36, "ADMIN_LOG_LEVEL", CLIENT)
class AdminLogLevel:
    """Least important messages that are logged from now on, by processes that are started later too."""

    level: str = required(Text(16), "debug, info, warning or error.")
    role: str | None = optional(Text(64), "Only these: supervisor, dispatcher, kvpool, worker, or one: worker 0.")


@message(37, "ADMIN_DUMP", CLIENT)
class AdminDump:
    """Ask for what the dispatcher knows: connections, requests, queue, workers, pools. Never tokens."""


@message(40, "ADMIN_REPLY", SERVER)
class AdminReply:
    """The outcome of an ADMIN message."""

    ok: bool = required(Flag(), "It was done.")
    error: str = optional(Text(4096), "Why not.", "")
    result: bytes = optional(Blob(MAX_RESULT), "A JSON object as UTF-8, with what there is to tell.", b"")
