"""The device that arrays are loaded onto."""

from __future__ import annotations

from typing import Any, TypeAlias

Device: TypeAlias = Any
"""A ``torch.device``, or what it takes: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or the number of a CUDA device."""


def cuda_device(device: Device) -> Any | None:
    """The CUDA device that is meant, with its number; None for host memory.

    Args:
        device: The device. ``"cuda"`` is torch's current one.

    Raises:
        TypeError, ValueError: It is no device, or neither host memory nor a CUDA device of this process.
        ImportError: It is not ``"cpu"``, and torch is not installed.
    """
    if isinstance(device, str) and device == "cpu":
        return None
    import torch

    if not isinstance(device, str | int | torch.device) or isinstance(device, bool):
        raise TypeError(f"device: {device!r:.80} is no device")
    try:
        meant = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: {device!r:.80} is no device") from error
    if meant.type == "cpu":
        return None
    if meant.type != "cuda":
        raise ValueError(f"device: {device!r:.80} is neither the CPU nor a CUDA device")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0 or (meant.index or 0) >= count:
        raise ValueError(f"device: {device!r:.80} does not exist: torch finds {count} CUDA devices")
    return torch.device("cuda", torch.cuda.current_device() if meant.index is None else meant.index)
