"""DTensors whose local tensors consist of others: each rank stores its local tensor, and takes back the same part."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from datastates.errors import ProviderError
from datastates.state import dtensors, sharded_tensors, subclasses
from datastates.state.keys import boxes
from datastates.state.nested import items


def check_boxes(name: str, listed: Collection[str], live: Callable[[], dict[str, Any]]) -> None:
    """Compare the stored parts of such DTensors with those that this rank holds now.

    Args:
        name: The provider's name, for messages.
        listed: The keys of the stored arrays.
        live: Returns the live tensors by key. It is only called if there are such parts.

    Raises:
        ProviderError: A live tensor is another part of the logical tensor than the stored one; the message names both.
    """
    stored = boxes(listed)
    tensors = live() if stored else {}
    for key, box in stored.items():
        tensor: Any = tensors.get(key)
        if not subclasses.is_tensor(tensor):
            continue  # it is compared like any other value
        if dtensors.is_dtensor(tensor):
            held = dtensors.box_of(key, tensor)
        else:
            held = ",".join(f"0-{size}of{size}" for size in tensor.shape)
        if held != box:
            raise ProviderError(
                f"{name!r}: {key!r} consists of other tensors, and was saved in parts. This rank gets {box}, but it "
                f"holds {held}: restore on as many ranks, in the same layout. Save by the DCP writer to change it"
            )


def placed_like(value: Any, live: Any) -> Any:
    """Make DTensors of the restored parts in a nested value, where the live value has DTensors; changes containers.

    A ShardedTensor of the live value, which has been read in place, takes the place of its part.
    """
    if isinstance(value, (dict, list)) and isinstance(live, type(value)):
        for k, item in items(value):
            if k in live if isinstance(live, dict) else k < len(live):
                value[k] = placed_like(item, live[k])
        return value
    if sharded_tensors.is_sharded(live):
        return live
    return subclasses.beside(live, value) if dtensors.is_dtensor(live) else value
