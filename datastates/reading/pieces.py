"""Reads a logical tensor piece by piece, as NumPy arrays to calculate with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from datastates.executor.executor import Executor
from datastates.reading.reads import Reads
from datastates.reading.tensors import Tensors
from datastates.state import arrays, memory, parts, strides
from datastates.state.dtypes import DType
from datastates.state.shards import ArrayRef

MOST = 2 << 20
"""Most elements of a piece."""


def are_numbers(dtype: DType) -> bool:
    """Whether NumPy, alone or with torch or ml_dtypes, calculates with elements of the type."""
    return dtype.numpy is not None


def pieces(tensors: Tensors, key: str, executor: Executor) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Read a tensor in boxes of at most :data:`MOST` elements, in row-major order.

    Args:
        tensors: The checkpoint.
        key: The full key of a tensor whose type is one of :func:`are_numbers`.
        executor: Reads the bytes.

    Yields:
        The index of the box's first element, and the box: of the tensor's type if NumPy has it, else of float64.

    Raises:
        CorruptError: Bytes do not match their checksum.
        StorageError: Reading failed.
        ImportError: The element type needs torch or ml_dtypes and neither is installed.
    """
    ((like, sources),) = tensors.whole([key])
    for begin, size in parts.boxes(like.global_shape, MOST):
        box = _empty(like.dtype, key, size)
        shard = replace(arrays.array_shard(key, box), global_shape=like.global_shape, offset=begin)
        reads = Reads(in_full=True)
        for source, row in sources:
            reads.add(source, row, shard)
        reads.run(executor)
        yield begin, box if _is_numpys(like.dtype) else _as_float64(box, key, size)


def _is_numpys(dtype: DType) -> bool:
    return dtype.numpy != dtype.name


def _empty(dtype: DType, key: str, size: tuple[int, ...]) -> Any:
    kind = "torch" if dtype.in_torch and not _is_numpys(dtype) else "numpy"
    return memory.empty(ArrayRef(key, kind, dtype.name, size, strides.row_major(size)))


def _as_float64(box: Any, key: str, size: tuple[int, ...]) -> Any:
    made = memory.empty(ArrayRef(key, arrays.kind_of(box) or "numpy", "float64", size, strides.row_major(size)))
    memory.convert(made, box)
    return np.asarray(made)
