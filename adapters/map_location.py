"""``map_location`` of ``torch.load``, for memory that is yet to be filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def placed(map_location: Any) -> Callable[[Any], Any]:
    """Where an array of bytes on the CPU is to be, by a device, its name, a dict of names or a callable.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu", "cpu")
    if map_location is None:
        return lambda block: block
    if isinstance(map_location, (str, torch.device)):
        device = torch.device(map_location)
        return lambda block: block if device.type == "cpu" else torch.empty_like(block, device=device)
    if callable(map_location):
        return lambda block: _moved(block, map_location(block.untyped_storage(), "cpu"))
    raise TypeError(f"map_location: a device, its name, a dict or a callable is wanted, not {map_location!r:.80}")


def _moved(block: Any, storage: Any) -> Any:
    if storage is None:  # torch's default, where the callable does not care
        return block
    untyped = getattr(storage, "_untyped_storage", storage)
    return torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped)
