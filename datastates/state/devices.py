"""The CUDA streams on which torch and CuPy enqueue work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from datastates._base.columns import I32, U64
from datastates._base.loaded import loaded
from datastates.state.shards import HOST


def current_stream(kind: str, device: int) -> int:
    """Handle of the stream on which a library (``"torch"`` or ``"cupy"``) now enqueues work; 0 for host memory.

    It is 0 for JAX, too: JAX does not tell its streams, and its arrays are described only once they are computed.
    """
    if device == HOST or kind == "jax":
        return 0
    if kind == "torch":
        torch: Any = loaded("torch")
        return int(torch.cuda.current_stream(device).cuda_stream)
    cupy: Any = loaded("cupy")
    with cupy.cuda.Device(device):
        return int(cupy.cuda.get_current_stream().ptr)


def streams(devices: I32) -> U64:
    """For each device number, the handle of the stream on which torch now enqueues work; 0 for host memory."""
    result = np.zeros(len(devices), np.uint64)
    for device in set(devices.tolist()):
        result[devices == device] = current_stream("torch", device)
    return result


def current_device() -> int | None:
    """The number of torch's current CUDA device; None if torch has not initialized CUDA."""
    torch: Any = loaded("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else None


def consumer_streams(devices: Sequence[int]) -> list[tuple[int, int]]:
    """Each pair (device number, stream handle) on which torch and CuPy, if imported, would now enqueue an update."""
    torch: Any = loaded("torch")
    kinds = [*(["torch"] if torch and torch.cuda.is_initialized() else []), *(["cupy"] if loaded("cupy") else [])]
    return sorted({(d, current_stream(kind, d)) for kind in kinds for d in devices})
