"""Equality of nested state: types, structure, and every bit of every array."""

from __future__ import annotations

from typing import Any

import numpy as np

from datastates.state import arrays, jax_arrays


def equal(a: Any, b: Any) -> bool:
    """Whether two nested values are equal: the same types, keys and order of keys, and arrays that agree in every bit.

    Two arrays are equal if their library, dtype, shape and bits are. Their devices and strides may differ. NaNs of
    the same bits are equal. Typed random keys of JAX are equal if their implementation and numbers are. Dicts, lists
    and tuples are compared item by item, other objects by ``==``.

    Args:
        a: One value.
        b: The other.
    """
    return difference(a, b) is None


def difference(a: Any, b: Any, at: str = "state") -> str | None:
    """Describe the first place where :func:`equal` finds two nested values different; None if they are equal.

    Args:
        a: One value.
        b: The other.
        at: Name of the values, which the description begins with.
    """
    if jax_arrays.is_key(a) and jax_arrays.is_key(b):
        names = [jax_arrays.key_name(keys) for keys in (a, b)]
        if names[0] != names[1]:
            return f"{at}: random keys of {names[0]!r} are not of {names[1]!r}"
        return difference(jax_arrays.key_data(a), jax_arrays.key_data(b), at)
    kind = arrays.kind_of(a)
    if kind is not None or type(a) is not type(b):
        is_equal = kind is not None and kind == arrays.kind_of(b) and _same_bits(a, b)
        return None if is_equal else f"{at}: {_shown(a)} is not {_shown(b)}"
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{at}: keys {_shown(list(a))} are not {_shown(list(b))}"
        return next(filter(None, (difference(a[k], b[k], f"{at}[{k!r}]") for k in a)), None)
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{at}: {len(a)} items are not {len(b)}: {_shown(a)}, {_shown(b)}"
        pairs = enumerate(zip(a, b, strict=True))
        return next(filter(None, (difference(x, y, f"{at}[{i}]") for i, (x, y) in pairs)), None)
    if isinstance(a, np.ndarray):  # of strings, objects or dates, which are pickled
        is_equal = a.dtype == b.dtype and np.array_equal(a, b)
    else:
        is_equal = bool(a == b) or (isinstance(a, float) and a != a and b != b)
    return None if is_equal else f"{at}: {_shown(a)} is not {_shown(b)}"


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    text = text if len(text) <= 200 else f"{text[:200]}..."
    if arrays.kind_of(value) is None:
        return text
    return f"{text} ({value.dtype}, shape {tuple(value.shape)})"


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
