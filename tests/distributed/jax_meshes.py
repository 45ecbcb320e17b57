"""A tree of JAX's arrays over a mesh of all devices of all processes."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_random = np.random.default_rng(0)
VALUES = {
    "rows": _random.integers(0, 9, (1024, 512)).astype(np.float32),
    "columns": _random.random((512, 1024), np.float32),
    "alike": _random.random((256, 512), np.float32).astype(ml_dtypes.bfloat16),
    "grid": _random.integers(0, 100, (512, 512)).astype(np.int16),
}
"""The logical arrays. The sum of the first is exact."""
FOLDER = {"rows": VALUES["rows"], "wide": np.arange(16 << 16, dtype=np.float32).reshape(16, 1 << 16)}
"""What is in a folder of safetensors. Half a row of the second array is longer than a gap that is read along."""
RATES = np.arange(100.0)
"""An array of NumPy that all processes hold alike."""


def shardings(shape: tuple[int, ...]) -> dict[str, NamedSharding]:
    """How each array lies on the first devices, as many as a mesh of that shape has."""
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), tuple("ab"[: len(shape)]))
    last = mesh.axis_names[-1]
    specs = {
        "rows": PartitionSpec(mesh.axis_names),
        "columns": PartitionSpec(None, last),
        "alike": PartitionSpec(),
        "grid": PartitionSpec(last, "a" if len(shape) > 1 else None),
    }
    return {key: NamedSharding(mesh, spec) for key, spec in specs.items()}


def tree(shape: tuple[int, ...]) -> dict[str, Any]:
    """The arrays on a mesh, and a number."""
    arrays = {
        key: jax.make_array_from_callback(VALUES[key].shape, sharding, lambda box, key=key: VALUES[key][box])
        for key, sharding in shardings(shape).items()
    }
    return {**arrays, "step": 7}


def on_one_device() -> Any:
    """An array on a single device, which only one process has."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("a",)), PartitionSpec())
    return jax.make_array_from_callback(RATES.shape, sharding, lambda box: RATES[box].astype(np.float32), np.float32)


def described(shape: tuple[int, ...]) -> dict[str, Any]:
    """The tree without contents, for a restore."""
    arrays = {
        key: jax.ShapeDtypeStruct(VALUES[key].shape, VALUES[key].dtype, sharding=sharding)
        for key, sharding in shardings(shape).items()
    }
    return {**arrays, "step": 0}


def described_folder() -> dict[str, Any]:
    """The arrays of the folder without contents: one is cut by rows over all devices, the other one by columns."""
    mesh = Mesh(np.array(jax.devices()), ("a",))
    specs = {"rows": PartitionSpec("a"), "wide": PartitionSpec(None, "a")}
    return {
        key: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, specs[key]))
        for key, array in FOLDER.items()
    }


def wrong(found: dict[str, Any], saved: dict[str, np.ndarray[Any, Any]] | None = None) -> list[str]:
    """The keys whose values are not those that were saved, on this process's devices."""
    return [
        key
        for key, whole in (saved or {**VALUES, "step": np.array(7)}).items()
        if (
            found[key] != whole
            if key == "step"
            else any(np.asarray(s.data).tobytes() != whole[s.index].tobytes() for s in found[key].addressable_shards)
        )
    ]
