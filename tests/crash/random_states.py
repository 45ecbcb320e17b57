"""Random states of NumPy arrays, containers and plain values, and a comparison of two states to the bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "u2", "?", "c8", "c16"]


def random_array(rng: random.Random) -> Any:
    shape = [rng.choice([0, 1, 2, 3, 7, 30]) for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.05:
        shape = [rng.randint(100_000, 400_000)]  # larger than the host cache with the wider types
    data = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 100, shape)
    array = np.asarray(data, rng.choice(DTYPES))
    if array.ndim >= 2 and rng.random() < 0.3:
        array = array.T if rng.random() < 0.5 else array[:, ::2]
    return array


def random_tree(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.35:
        return random_array(rng)
    if kind < 0.5:
        return rng.choice([None, True, rng.randint(-(1 << 70), 1 << 70), rng.random(), "text/with|dots.", b"\0bytes"])
    count = rng.randint(0, 4)
    if kind < 0.8:
        keys = rng.sample(["a", "b.c", "d/e", "7", "", "ü", "x|y"], count)
        return {key: random_tree(rng, depth - 1) for key in keys}
    parts = [random_tree(rng, depth - 1) for _ in range(count)]
    return parts if rng.random() < 0.6 else tuple(parts)


def arrays_in(tree: Any) -> list[Any]:
    if isinstance(tree, np.ndarray):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else []
    return [array for part in parts for array in arrays_in(part)]


def differences(found: Any, expected: Any, at: str = "") -> list[str]:
    """Where two states differ: in type, structure, or any bit."""
    if type(found) is not type(expected):
        return [at]
    if isinstance(expected, dict):
        if list(found) != list(expected):
            return [at]
        return [d for key in expected for d in differences(found[key], expected[key], f"{at}/{key}")]
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return [at]
        pairs = enumerate(zip(found, expected, strict=True))
        return [d for i, (f, e) in pairs for d in differences(f, e, f"{at}/{i}")]
    if isinstance(expected, np.ndarray) or hasattr(expected, "untyped_storage"):
        same = (found.dtype, found.shape) == (expected.dtype, expected.shape) and _bytes(found) == _bytes(expected)
        return [] if same else [at]
    return [] if found == expected else [at]


def _bytes(array: Any) -> bytes:
    if isinstance(array, np.ndarray):
        return array.tobytes()
    import torch

    return bytes(array.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
