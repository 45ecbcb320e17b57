"""The items of a LoadPlan, as this package reads them."""

from __future__ import annotations

import io
import pickle

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from datastates.adapters.dcp.names import is_key_of, key_of_chunk
from datastates.errors import FormatError
from datastates.formats.dcp_wanted import Wanted


class PlannedItem(Wanted):
    """An item of a plan, at its place from the checkpoint's metadata; the planner names its tensor."""

    __slots__ = ("_planner", "item")

    def __init__(self, item: ReadItem, place: _StorageInfo, planner: LoadPlanner) -> None:
        """Describe the item."""
        index = item.storage_index
        self.item, self._planner = item, planner
        self.begin = tuple(index.offset or ())
        is_first = not any(self.begin)
        self.name = f"{index.fqn!r}" + ("" if is_first else f" of {self.begin}")
        self.key = index.fqn if is_first else key_of_chunk(index)
        self.offset, self.length = place.offset, place.length
        self.is_bytes, self.is_transformed = item.type == LoadItemType.BYTE_IO, bool(place.transform_descriptors)
        self.within, self.lengths = tuple(item.storage_offsets), tuple(item.lengths)

    def is_stored_as(self, key: str) -> bool:
        """Whether a container's key names the stored part."""
        return is_key_of(key, self.item.storage_index)

    def target(self) -> torch.Tensor:
        """The tensor that the item is read into; raises ValueError if it has another shape."""
        target = self._planner.resolve_tensor(self.item).detach()
        if target.shape != self.item.lengths:
            raise ValueError(f"{self.name}: {self.lengths} of it go to a tensor of shape {tuple(target.shape)}")
        return target

    def filled(self, target: torch.Tensor) -> None:
        """Tell the planner that the item has been read."""
        self._planner.commit_tensor(self.item, target)

    def take(self, data: io.BytesIO) -> None:
        """Take bytes, or copy the part that the item is of a pickled tensor, by the code of its class, as torch does.

        Raises:
            FormatError: torch does not know the tensor's class; the message names the item and the class.
            ValueError: The tensor has another shape than the item.
        """
        if self.is_bytes:
            self._planner.load_bytes(self.item, data)
            return
        try:
            tensor = torch.load(data, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise FormatError(f"{self.name} cannot be read: {error}") from error
        target = self.target()
        target.copy_(narrow_tensor_by_index(tensor, self.item.storage_offsets, self.item.lengths))
        self.filled(target)
