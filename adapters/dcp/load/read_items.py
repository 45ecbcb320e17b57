"""The items of a LoadPlan: their names for messages, and the memory that each is read into."""

from __future__ import annotations

import io
import pickle
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from datastates.container.table import Row
from datastates.errors import FormatError
from datastates.reading.read_queue import Source
from datastates.reading.reads import Reads
from datastates.state import arrays
from datastates.state.strides import span

Place = tuple[ReadItem, _StorageInfo]
"""An item, and its place from the checkpoint's metadata."""


def begin_of(item: ReadItem) -> tuple[int, ...]:
    """First index of the item's stored part in its logical tensor, in elements along each dimension."""
    return tuple(item.storage_index.offset or ())


def name_of(item: ReadItem) -> str:
    """The name of the item's stored part in messages."""
    begin = begin_of(item)
    return f"{item.storage_index.fqn!r}" + (f" of {begin}" if any(begin) else "")


def target_of(item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    """The tensor that an item is read into.

    Raises:
        ValueError: The tensor has another shape than the item; the message names it.
    """
    target = planner.resolve_tensor(item).detach()
    if target.shape != item.lengths:
        raise ValueError(f"{name_of(item)}: {tuple(item.lengths)} of it go to a tensor of shape {tuple(target.shape)}")
    return target


def take_pickled(planner: LoadPlanner, item: ReadItem, data: io.BytesIO) -> None:
    """Copy the part that an item wants of a pickled tensor, by the code of its class, as torch's reader does.

    Raises:
        FormatError: torch does not know the tensor's class; the message names the item and the class.
        ValueError: The tensor has another shape than the item.
    """
    try:
        tensor = torch.load(data, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FormatError(f"{name_of(item)} cannot be read: {error}") from error
    target = target_of(item, planner)
    target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
    planner.commit_tensor(item, target)


def is_memory(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether elements of type ``dtype`` can be read straight into a tensor's memory."""
    return target.dtype == dtype and arrays.kind_of(target) is not None


class ClaimedMemory:
    """Memory that a load reads into. Tensors that share memory must not be read there at the same time."""

    def __init__(self) -> None:
        """Begin with no memory claimed."""
        self._ranges: dict[torch.device, tuple[list[int], list[int]]] = {}

    def claim(self, target: torch.Tensor) -> bool:
        """Claim a tensor's memory, from its first element to its last; False, and no claim, if some of it is taken."""
        begin = target.data_ptr()
        end = begin + span(tuple(target.shape), target.stride()) * target.element_size()
        begins, ends = self._ranges.setdefault(target.device, ([], []))
        at = bisect_right(begins, begin)
        if (at and ends[at - 1] > begin) or (at < len(begins) and begins[at] < end):
            return False
        if begin < end:
            begins.insert(at, begin)
            ends.insert(at, end)
        return True


def queue_box(
    reads: Reads, source: Source, row: Row, item: ReadItem, planner: LoadPlanner, claims: ClaimedMemory | None = None
) -> Callable[[], None]:
    """Plan to read an item from a stored row, which is a box of its logical tensor.

    Args:
        reads: The reads of this load, to add to.
        source: The file that has the row.
        row: The stored row.
        item: The item.
        planner: Names the tensor that the item is read into.
        claims: The memory that this load reads into. A tensor whose memory is taken is filled from a copy. None: no
            tensors of this load can share memory.

    Returns:
        A function to call once the item has been read.

    Raises:
        ValueError: The tensor has another shape than the item.
    """
    assert row.box is not None
    target = target_of(item, planner)
    dtype = getattr(torch, row.dtype.name)
    in_place = is_memory(target, dtype) and (claims is None or claims.claim(target))
    landing = target if in_place else torch.empty(item.lengths, dtype=dtype, device="cpu")
    live = arrays.destination(row.key, landing)
    offset = tuple(first + begin for first, begin in zip(row.box, item.storage_offsets, strict=True))
    reads.add(source, row, replace(live, global_shape=row.global_shape, offset=offset))

    def end() -> None:
        if landing is not target:
            target.copy_(landing)
        planner.commit_tensor(item, target)

    return end
