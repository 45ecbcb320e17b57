"""The items of a SavePlan as boxes of one file, and the place of each item in it, for DCP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from datastates._base import gc_pause
from datastates.adapters.dcp.names import AGAIN, key_of_chunk
from datastates.files.boxes import Box, BoxFile


def boxes_of(plan: SavePlan, planner: SavePlanner, indices: dict[str, MetadataIndex]) -> Iterator[Box]:
    """The items of a plan: a tensor is a box of its logical tensor, an object its pickled bytes.

    Args:
        plan: The items to write.
        planner: Resolves each item to its data.
        indices: Takes DCP's name of each item, by the key of its box.
    """
    names = Counter(item.index.fqn for item in plan.items)
    live: dict[str, Any] = getattr(planner, "state_dict", None) or {}
    for item in plan.items:
        key = item.index.fqn if names[item.index.fqn] == 1 else key_of_chunk(item.index)
        while key in indices:  # another tensor may have the name that is made here for a chunk
            key += AGAIN
        indices[key] = item.index
        data: Any = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            yield Box(key, data)
            continue
        described = item.tensor_data
        assert described is not None
        chunk, whole = described.chunk, tuple(described.size)
        yield Box(key, data, tuple(chunk.sizes), tuple(chunk.offsets), whole, live.get(item.index.fqn))


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A file that is being written, and DCP's names of its boxes, by key."""

    file: BoxFile
    indices: dict[str, MetadataIndex]

    @gc_pause.paused()
    def results(self, nbytes: int) -> list[WriteResult]:
        """The place of each item in the file, for DCP; raises as :meth:`~datastates.files.boxes.BoxFile.places`.

        Args:
            nbytes: The length of the file as it was written.
        """
        return [
            WriteResult(self.indices[key], place[1], _StorageInfo(self.file.path.name, *place))
            for key, place in self.file.places(nbytes)
        ]
