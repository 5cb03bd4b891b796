"""The metrics process as a child: nothing needs it, and it is there from the start to the end."""

from __future__ import annotations

import itertools

from ..common.metrics import Source
from ..common.pages import Book
from ..common.settings import Settings
from .children import Steady
from .roles import Role
from .sockets import Listener


class Exporter(Steady):
    """version: of the package that it runs. Its page holds no numbers."""

    def __init__(self, role: Role, book: Book, listener: Listener, settings: Settings, version: str) -> None:
        super().__init__(role, book.take(Source.METRICS.value), itertools.count(1), fresh=False)
        self._book, self._listener, self._settings, self.version = book, listener, settings, version

    def launch(self, now: float) -> None:
        """OSError if the system has no room."""
        self.start(now, self._settings, None, first=(self._listener.sock,), last=(self._book,))

    def follow(self, version: str) -> None:
        """This version of the package serves now: what its processes count, only the same version can read."""
        if version != self.version:
            self.version, self.fresh = version, True
            self.replace()
