"""What a model to be converted must offer, whatever it is stored as."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConversionError
from ..geometry import Geometry, Slot
from .tensor import F32, Tensor


@dataclass
class Companions:
    """Files that travel beside the weights, and what the user should know about those that cannot."""

    files: dict[str, bytes] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class Source(ABC):
    """A readable model. All failures are ConversionErrors."""

    path: Path
    name: str
    architecture: str
    geometry: Geometry
    rope_freqs: F32

    @abstractmethod
    def check(self, wanted: Iterable[Slot]) -> None:
        """Refuses the source, before anything is written, if a tensor is missing, unexpected or of a wrong shape."""

    @abstractmethod
    def tensor(self, slot: Slot) -> Tensor:
        """The weights of a slot. Slots are asked for in slots() order."""

    @abstractmethod
    def companions(self) -> Companions:
        """Tokenizer, chat template and configuration."""


def matrix_shape(slot: Slot) -> tuple[int, int]:
    """A slot's shape with a vector as one row."""
    return (1, slot.shape[0]) if len(slot.shape) == 1 else (slot.shape[0], slot.shape[1])


def require_shape(path: Path, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raises ConversionError if a stored tensor does not have the shape the configuration implies."""
    if shape != expected:
        reason = f"has shape {list(shape)}, the configuration implies {list(expected)}"
        raise ConversionError(path, reason, name)


def refuse_unexpected(path_of: dict[str, Path], used: set[str], ignored: tuple[str, ...]) -> None:
    """Raises ConversionError for a tensor the architecture has no place for; a bias is called one."""
    for name in sorted(path_of.keys() - used):
        if name.endswith(ignored):
            continue
        reason = "is a bias, which is not supported" if name.endswith(".bias") else "is not part of this architecture"
        raise ConversionError(path_of[name], reason, name)
