"""What a LoadPlan tells a rank to read: what its items are called, and the memory that they go to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from datastates import arrays
from datastates.read_queue import Source
from datastates.reads import Reads
from datastates.shard_table import Row


def begin_of(item: ReadItem) -> tuple[int, ...]:
    """Where the stored part that it is taken from begins in its logical tensor."""
    return tuple(item.storage_index.offset or ())


def name_of(item: ReadItem) -> str:
    """What that part is called in messages."""
    begin = begin_of(item)
    return f"{item.storage_index.fqn!r}" + (f" of {begin}" if any(begin) else "")


def target_of(item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    """The tensor that an item goes to.

    Raises:
        ValueError: It has another shape; the message names it.
    """
    target = planner.resolve_tensor(item).detach()
    if target.shape != item.lengths:
        raise ValueError(f"{name_of(item)}: {tuple(item.lengths)} of it go to a tensor of shape {tuple(target.shape)}")
    return target


def is_memory(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether bytes of elements of that type can be read to where a tensor has its elements."""
    return target.dtype == dtype and arrays.kind_of(target) is not None


def queue_box(reads: Reads, source: Source, row: Row, item: ReadItem, planner: LoadPlanner) -> Callable[[], None]:
    """Plan to read what an item wants of a stored row, a box; returns what is to be done once it has been read."""
    assert row.box is not None
    target = target_of(item, planner)
    dtype = getattr(torch, row.dtype.name)
    landing = target if is_memory(target, dtype) else torch.empty(item.lengths, dtype=dtype)
    live = arrays.destination(row.key, landing)
    offset = tuple(first + begin for first, begin in zip(row.box, item.storage_offsets, strict=True))
    reads.add(source, row, replace(live, global_shape=row.global_shape, offset=offset))

    def end() -> None:
        if landing is not target:
            target.copy_(landing)
        planner.commit_tensor(item, target)

    return end
