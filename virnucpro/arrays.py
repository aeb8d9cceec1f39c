"""Names for numpy's array types, by their elements, for annotations; and arrays that stay in their files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from virnucpro.durable import surroundings_named

if TYPE_CHECKING:
    from pathlib import Path

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
DoubleArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
ByteArray = NDArray[np.uint8]


def mapped(path: Path, dtype: Any, *shape: int) -> NDArray[Any]:
    """Map a file as a read-only array, by default all of it in one dimension; SurroundingsError where that fails."""
    with surroundings_named(path):
        return np.memmap(path, dtype, "r", shape=shape or None)
