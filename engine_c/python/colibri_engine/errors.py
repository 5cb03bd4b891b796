"""Every error colibri_engine raises on purpose. Messages name the file, the field or tensor, and the remedy."""

from __future__ import annotations

from pathlib import Path


class ColibriError(Exception):
    """Base of all errors of this package. ``str()`` is a complete sentence for a person at a terminal."""


class ConversionError(ColibriError):
    """A source model cannot be read or converted.

    ``path`` is the file or folder at fault and ``item`` the tensor or configuration field, when there is one.
    """

    def __init__(self, path: Path | str, reason: str, item: str | None = None) -> None:
        self.path, self.item, self.reason = Path(path), item, reason
        super().__init__(f"{path}: {item}: {reason}" if item else f"{path}: {reason}")


class ContainerError(ColibriError):
    """A model container is malformed, damaged or cannot be written. Fields as in ConversionError."""

    def __init__(self, path: Path | str, reason: str, item: str | None = None) -> None:
        self.path, self.item, self.reason = Path(path), item, reason
        super().__init__(f"{path}: {item}: {reason}" if item else f"{path}: {reason}")


class EngineError(ColibriError):
    """libcolibri reported a failure; ``status`` is its colibri_status_t."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)
