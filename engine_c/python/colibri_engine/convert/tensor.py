"""A source's tensor: a matrix that can be read a slab of rows at a time, as float32 or as it was quantised."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Quants = tuple[npt.NDArray[np.int8], npt.NDArray[np.uint16]]  # q [n, cols], f16 scale bits [n, cols/32]


@dataclass(frozen=True)
class Tensor(ABC):
    """rows x cols; a vector is one row. path and name are for messages."""

    path: Path
    name: str
    rows: int
    cols: int

    @abstractmethod
    def read(self, start: int, stop: int) -> F32:
        """Rows [start, stop) as f32 [stop - start, cols]."""

    def quants(self, dtype: str, start: int, stop: int) -> Quants | None:
        """The same rows already quantised the way `dtype` stores them; None if they are not."""
        return None


@dataclass(frozen=True)
class ArrayTensor(Tensor):
    """One that is in memory."""

    values: F32

    def read(self, start: int, stop: int) -> F32:
        return self.values[start:stop]


def array_tensor(path: Path, name: str, values: F32) -> ArrayTensor:
    """Wraps a vector [n] or a matrix [rows, cols]."""
    matrix = np.atleast_2d(values)
    return ArrayTensor(path, name, matrix.shape[0], matrix.shape[1], matrix)
