"""Client of the Colibri daemon: ``Client`` blocks, ``AsyncClient`` is for asyncio. Both stream, cancel, retry what may
be retried, and continue an output token for token when the connection to the daemon breaks and comes back."""

from . import errors
from .admin import Admin
from .aio import AsyncClient
from .errors import ColibriError
from .results import Completion, Scores, Token
from .stream import AsyncStream
from .sync import Client, Stream

__all__ = ["Admin", "AsyncClient", "AsyncStream", "Client", "ColibriError", "Completion", "Scores", "Stream", "Token",
           "errors"]
