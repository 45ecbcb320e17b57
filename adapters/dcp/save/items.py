"""Writes the items of a SavePlan as shards of one container, and tells DCP the place of each item in the file."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from datastates._base import gc_pause
from datastates.adapters.dcp.names import AGAIN, NAME, key_of_chunk
from datastates.commit.ending import FileEnding
from datastates.container.table import Row
from datastates.errors import CommitError, ProviderError
from datastates.files.staging import Staged
from datastates.saving.container_frame import ContainerFrame, ContainerFraming
from datastates.saving.running import Running
from datastates.saving.saver import Saver
from datastates.saving.snapshot import describe
from datastates.state import arrays, dtensors, subclasses
from datastates.state.provider import StateProvider
from datastates.state.shards import Buffer, Shard
from datastates.storage import Location, store_of

FRAMING = ContainerFraming(nested=True)
"""The format of a rank's files: each record is an archive of one tensor, as torch's reader wants it."""


class ItemsProvider(StateProvider):
    """The items of one SavePlan: a tensor is a box of its logical tensor, an object an array of its pickled bytes.

    A tensor that consists of other tensors is stored as an object is.
    """

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Take the items of a plan. Its tensors must not change before they are captured; objects are pickled now.

        Raises:
            ProviderError: An item cannot be stored, or has another shape than planned; the message names it.
        """
        super().__init__(NAME)
        names = Counter(item.index.fqn for item in plan.items)
        live: dict[str, Any] = getattr(planner, "state_dict", None) or {}
        memory: dict[tuple[object, ...], Shard] = {}
        self._shards: list[Shard] = []
        self.indices: dict[str, MetadataIndex] = {}
        """DCP's name of each item, by key."""
        for item in plan.items:
            key = item.index.fqn if names[item.index.fqn] == 1 else key_of_chunk(item.index)
            while key in self.indices:  # another tensor may have the name that is made here for a chunk
                key += AGAIN
            data: Any = planner.resolve_data(item)
            if item.type != WriteItemType.BYTE_IO and _is_composed(data):
                data = _pickled(data)
            if isinstance(data, io.BytesIO):
                shard = arrays.array_shard(key, np.frombuffer(data.getbuffer(), np.uint8), lazy=False)
            else:
                shard = _tensor_shard(key, item, data.detach())
                buffer = shard.buffer
                assert buffer is not None
                # a record is an archive of one tensor: a tensor that shares its memory in another shape is copied
                first = memory.setdefault((buffer.device, buffer.pointer, buffer.nbytes, shard.dtype), shard)
                if (first.shape, first.stride) != (shard.shape, shard.stride):
                    shard = _tensor_shard(key, item, data.detach().clone())
                elif _is_of(whole := live.get(item.index.fqn), data):
                    shard = replace(shard, source=whole)  # it has a version of its own
                if not buffer.nbytes:  # empty tensors of different shapes must not share a record
                    shard = replace(shard, buffer=Buffer(len(self._shards) + 1, 0), buffer_offset=0)
            self._shards.append(shard)
            self.indices[key] = item.index

    def shards(self) -> Sequence[Shard]:
        """The items of the plan, each as an array shard."""
        return self._shards


def _is_of(value: object, local: torch.Tensor) -> bool:
    """Whether a value is the DTensor of a local tensor."""
    return dtensors.is_dtensor(value) and arrays.address(value) == arrays.address(local)


def _is_composed(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of other tensors, as torchao's do. Torch saves such a tensor by its class."""
    return arrays.kind_of(tensor) is None and subclasses.is_composed(tensor) and tensor.layout is torch.strided


def _pickled(tensor: torch.Tensor) -> io.BytesIO:
    """The bytes that torch's own writer stores for a tensor. The class's own code makes them, so they are made now."""
    file = io.BytesIO()
    torch.save(tensor.detach().cpu(), file)
    return file


def _tensor_shard(key: str, item: WriteItem, tensor: torch.Tensor) -> Shard:
    described = item.tensor_data
    assert described is not None
    if tuple(tensor.shape) != tuple(described.chunk.sizes):
        raise ProviderError(
            f"{key!r}: its tensor has shape {tuple(tensor.shape)}, planned {tuple(described.chunk.sizes)}"
        )
    try:
        shard = arrays.array_shard(key, tensor, lazy=True)
    except TypeError as error:
        raise ProviderError(str(error)) from None
    return replace(shard, global_shape=tuple(described.size), offset=tuple(described.chunk.offsets))


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A file that is being written, and DCP's names of its arrays, by key."""

    path: Location
    indices: dict[str, MetadataIndex]
    places: Callable[[], Iterator[tuple[Row, tuple[int, int], tuple[int, int]]]]

    @gc_pause.paused()
    def results(self, nbytes: int) -> list[WriteResult]:
        """The place of each item in the file, for DCP: of a tensor's archive, or of an object's bare bytes.

        Args:
            nbytes: The length of the file as it was written.

        Raises:
            StorageError: The file has been removed.
            CommitError: The file has another length, so it was replaced.
        """
        there = store_of(self.path).length(self.path)
        if there != nbytes:
            raise CommitError(f"{self.path} was replaced: it has {there} bytes, and {nbytes} were written")
        found = []
        for row, data, archive in self.places():
            item, place = self.indices[row.key[len(NAME) + 1 :]], data if row.kind == "numpy" else archive
            found.append(WriteResult(item, place[1], _StorageInfo(self.path.name, *place)))
        return found


@gc_pause.paused()
def begin(
    saver: Saver, plan: SavePlan, planner: SavePlanner, ending: FileEnding, staged: Staged
) -> tuple[Running, Written]:
    """Begin to capture the items of a plan, and to write them into one container.

    Args:
        saver: Keeps the plan of the file before; its framing is :data:`FRAMING`.
        plan: The items to write.
        planner: Resolves each item to its data.
        ending: The path of the file, and its commit or removal.
        staged: The state. Its snapshot goes on with the file.

    Returns:
        The rest of the work, to be run; and the file, which tells DCP the place of each item once it is written.

    Raises:
        ProviderError: An item is no tensor that can be stored.
        StorageError: The file cannot be made.
        TornSnapshotError: The state has changed since it was staged; from this call on, the snapshot watches it.
    """
    provider = ItemsProvider(plan, planner)
    collected = saver.collect([provider])
    describe(staged.snapshot, nbytes=collected.structure.nbytes)
    running = saver.prepare(collected, staged.snapshot, ending)
    try:
        running.begin()
        running.open()
        running.job.wait_made()  # new_file() takes a name that no file has
        staged.check()
    except BaseException as error:
        running.cancel(error)
        raise
    frame = running.planned.frame
    assert isinstance(frame, ContainerFrame)
    return running, Written(ending.path, provider.indices, frame.places)
