"""Equality of nested state: types, structure, and every bit of every array."""

from __future__ import annotations

from typing import Any

import numpy as np

from datastates import arrays


def equal(a: Any, b: Any) -> bool:
    """Whether two nested values are equal: the same types, keys and order, and arrays that agree in every bit.

    Arrays may lie on different devices and have different strides. NaNs of the same bits are equal; objects of other
    classes are compared by ``==``.
    """
    kind = arrays.kind_of(a)
    if kind is not None:
        return kind == arrays.kind_of(b) and _same_bits(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, np.ndarray):  # of strings, objects, dates: what is pickled
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    return bool(a == b)


def _same_bits(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or tuple(a.shape) != tuple(b.shape):
        return False
    return _bits(a) == _bits(b)


def _bits(array: Any) -> bytes:
    match arrays.kind_of(array):
        case "torch":
            import torch

            flat = array.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)

            return bytes(flat.reshape(-1).view(torch.uint8).numpy().tobytes()) if flat.numel() else b""
        case "cupy":
            array = array.get()
    return bytes(np.ascontiguousarray(array).tobytes())
