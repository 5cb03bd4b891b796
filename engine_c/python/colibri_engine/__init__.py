"""Python side of libcolibri: engine binding, model converter and container tools.

Names are imported on first use, so that ``import colibri_engine`` costs nothing and the command line starts quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# public name -> module of this package that defines it
_EXPORTS = {
    "Engine": "engine",
    "Callbacks": "callbacks",
    "Manifest": "container",
    "ColibriError": "errors",
    "ConversionError": "errors",
    "ContainerError": "errors",
    "EngineError": "errors",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
