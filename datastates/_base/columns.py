"""Types of the one-dimensional NumPy arrays (columns) that stages hand each other."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

U64: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
U32: TypeAlias = "np.ndarray[Any, np.dtype[np.uint32]]"
I64: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
I32: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]]"
F64: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
U8: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
Bools: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"


def as_u64(values: object) -> U64:
    """Convert to a C-contiguous array of ``uint64``."""
    return np.ascontiguousarray(values, dtype=np.uint64)
