"""Version counters of torch tensors, which tell whether a tensor was changed in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from datastates._base.columns import I64
from datastates.state import dtensors, subclasses
from datastates.state.arrays import address
from datastates.state.tensor_scan import look


def has_version(array: Any) -> bool:
    """Whether torch counts an array's changes in place, as it does for all tensors not made in inference mode."""
    return subclasses.is_tensor(array) and not array.is_inference()


def witness(tensors: Sequence[Any]) -> tuple[I64, I64]:
    """Version counters and addresses of torch tensors, as in :class:`~datastates.state.tensor_scan.Look`."""
    seen = look(tensors)
    if seen is not None:
        return seen.versions, seen.addresses
    return np.array(list(map(_version, tensors)), np.int64), np.array(list(map(address, tensors)), np.int64)


def _version(tensor: Any) -> int:
    if not has_version(tensor):
        return -1
    local = dtensors.local(tensor)
    return int(tensor._version) + (int(local._version) if local is not tensor and has_version(local) else 0)
