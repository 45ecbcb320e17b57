"""Compares values in such a way that a NaN is the same as another NaN, and finds keys of mappings in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_UNORDERED = (set, frozenset)


def same(a: Any, b: Any) -> bool:
    """Whether two leaves are equal, where a NaN equals another NaN; False if they cannot be compared."""
    if type(a) is not type(b):
        return False
    if a is b:
        return True
    try:
        return _same(a, b)
    except Exception:  # the objects' own comparison may raise anything
        return False


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, _UNORDERED):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, dict):
        found = [own_key(b, key) for key in a]
        return len(a) == len(b) and all(
            k is not None and same(a[key], b[k[0]]) for key, k in zip(a, found, strict=True)
        )
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and all(map(same, a.ravel().tolist(), b.ravel().tolist()))
    if _is_nan(a):
        return _is_nan(b)
    return bool(a == b)


def _is_nan(value: Any) -> bool:
    """Whether a number is a NaN. A signaling NaN of ``Decimal`` raises an error if it is compared, so it is asked."""
    is_nan = getattr(value, "is_nan", None)
    return bool(is_nan()) if is_nan is not None else bool(value != value)


def own_key(mapping: Mapping[Any, Any], key: Any) -> tuple[Any] | None:
    """The mapping's own key that is the same as ``key``, in a tuple of one item; None if there is none."""
    if key in mapping:
        return (key,)
    if isinstance(key, (str, int)):
        return None
    return next(((own,) for own in mapping if same(own, key)), None)
