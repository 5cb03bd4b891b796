"""Typed access to a source's configuration: config.json's values or GGUF's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConversionError

_REQUIRED: Any = object()


@dataclass(frozen=True)
class Fields:
    """A read-only view of a mapping. A missing key without default and a value of the wrong type are ConversionErrors
    naming file and field. A default also stands in for null, as it does in transformers."""

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""  # for messages

    def fail(self, key: str, reason: str) -> ConversionError:
        return ConversionError(self.path, reason, f"{self.prefix}{key}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.fail(key, "is missing")
        return default

    def integer(self, key: str, default: Any = _REQUIRED, least: int = 1) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(key, f"is {_short(value)}, must be an integer")
        if value < least:
            raise self.fail(key, f"is {value}, must be at least {least}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A positive finite number."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.fail(key, f"is {_short(value)}, must be a number")
        if not 0 < value < 1e30 or not math.isfinite(value):
            raise self.fail(key, f"is {_short(value)}, must be positive and finite")
        return float(value)

    def boolean(self, key: str, default: Any = _REQUIRED) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"is {_short(value)}, must be true or false")
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.fail(key, f"is {_short(value)}, must be a string")
        return value

    def texts(self, key: str) -> list[str]:
        return self._list(key, str, "strings")

    def integers(self, key: str) -> list[int]:
        return self._list(key, int, "integers")

    def _list(self, key: str, kind: type, what: str) -> list[Any]:
        value = self._get(key, _REQUIRED)
        if not isinstance(value, list) or not all(isinstance(v, kind) for v in value):
            raise self.fail(key, f"must be a list of {what}")
        return value

    def section(self, key: str) -> Fields:
        """A nested object; empty if absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.fail(key, f"is {_short(value)}, must be an object")
        return Fields(self.path, value, f"{self.prefix}{key}.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
