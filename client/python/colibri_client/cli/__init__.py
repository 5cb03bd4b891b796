"""colibri-client: the command line of the client."""

from .app import main

__all__ = ["main"]
