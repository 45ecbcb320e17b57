"""The items of a LoadPlan, as this package reads them."""

from __future__ import annotations

import io
import pickle
from functools import partial

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from datastates.adapters.dcp.names import is_key_of, key_of_chunk
from datastates.errors import FormatError
from datastates.formats.dcp_wanted import Wanted


def name_of(item: ReadItem) -> str:
    """The name of the item's stored part in messages."""
    begin = tuple(item.storage_index.offset or ())
    return f"{item.storage_index.fqn!r}" + (f" of {begin}" if any(begin) else "")


def wanted_of(item: ReadItem, place: _StorageInfo, planner: LoadPlanner) -> Wanted:
    """An item at its place from the checkpoint's metadata. The planner names its tensor, or takes its bytes."""
    index, begin = item.storage_index, tuple(item.storage_index.offset or ())
    is_bytes = item.type == LoadItemType.BYTE_IO
    return Wanted(
        name_of(item),
        key_of_chunk(index) if any(begin) else index.fqn,
        (place.offset, place.length),
        is_bytes,
        bool(place.transform_descriptors),
        begin,
        tuple(item.storage_offsets),
        tuple(item.lengths),
        partial(is_key_of, index=index),
        partial(_target, planner, item),
        partial(planner.commit_tensor, item),
        partial(planner.load_bytes if is_bytes else partial(_take_pickled, planner), item),
    )


def _target(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
    target = planner.resolve_tensor(item).detach()
    if target.shape != item.lengths:
        raise ValueError(f"{name_of(item)}: {tuple(item.lengths)} of it go to a tensor of shape {tuple(target.shape)}")
    return target


def _take_pickled(planner: LoadPlanner, item: ReadItem, data: io.BytesIO) -> None:
    """Copy the part that an item wants of a pickled tensor, by the code of its class, as torch's reader does."""
    try:
        tensor = torch.load(data, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch does not know the class
        raise FormatError(f"{name_of(item)} cannot be read: {error}") from error
    target = _target(planner, item)
    target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
    planner.commit_tensor(item, target)
