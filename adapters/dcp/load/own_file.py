"""A file of this package for the storage reader: an opened container, and its arrays for the wanted items."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from datastates.adapters.dcp.load.read_items import begin_of, name_of, queue_box, take_pickled
from datastates.adapters.dcp.names import is_key_of
from datastates.container.file import Container
from datastates.container.table import Row
from datastates.errors import FormatError
from datastates.reading.reads import Reads
from datastates.state import arrays
from datastates.state.runs import pairs


class OwnFile:
    """A file of this package, and its arrays at the places that the checkpoint's metadata names."""

    def __init__(self, source: Container, needed: Sequence[tuple[ReadItem, _StorageInfo]]) -> None:
        """Find the arrays of the needed items in an opened container."""
        self.source = source
        shards, records = source.index.shards, source.index.records
        offset = np.unique(np.array([where.offset for _, where in needed if where.offset >= 0], np.uint64))
        # the first record whose data ends at or after the offset
        record = np.searchsorted(records.data_offset + records.nbytes, offset, "left")
        exists = record < len(records)
        offset, record = offset[exists], record[exists]
        begins = (records.header_offset[record] <= offset) & (offset <= records.data_offset[record])
        offset, record = offset[begins], record[begins]
        order = np.argsort(shards.record, kind="stable")
        of_row = shards.record[order]
        number, place = pairs(np.searchsorted(of_row, record, "left"), np.searchsorted(of_row, record, "right"))
        self._rows: dict[int, list[Row]] = {}
        for at, row in zip(offset[number].tolist(), shards.rows(order[place].tolist()), strict=True):
            self._rows.setdefault(at, []).append(row)

    def queue(self, reads: Reads, item: ReadItem, place: _StorageInfo, planner: LoadPlanner) -> Callable[[], None]:
        """Plan to read and verify one item.

        Args:
            reads: The reads of this load, to add to.
            item: The item.
            place: Its place from the checkpoint's metadata.
            planner: Names the tensor that the item is read into, or takes its bytes.

        Returns:
            A function to call once the item has been read.

        Raises:
            FormatError: The file holds something else at that place, or nothing.
            ValueError: The tensor has another shape than the item.
        """
        row = self._row(place.offset, item)
        if row.kind != "numpy":
            return queue_box(reads, self.source, row, item, planner)
        data = np.empty(place.length, np.uint8)
        reads.add_memory(self.source, place.offset, arrays.memory(data))
        take = planner.load_bytes if item.type == LoadItemType.BYTE_IO else partial(take_pickled, planner)
        return lambda: take(item, io.BytesIO(data.tobytes()))

    def _row(self, offset: int, item: ReadItem) -> Row:
        """The array at ``offset``, the place from the metadata, where its archive or its bare bytes begin."""
        is_bytes = item.type == LoadItemType.BYTE_IO
        rows = self._rows.get(offset, [])
        for row in rows:
            # the pickled bytes of an object, or of a tensor that consists of others
            alike = row.kind == "numpy" or (not is_bytes and row.box == begin_of(item))
            if alike and is_key_of(row.key, item.storage_index):
                return row
        there = f"{rows[0].key!r} of {rows[0].box}" if rows else "nothing"
        raise FormatError(
            f"{self.source.path} holds {there} at byte {offset}, where {name_of(item)} should be: it is another file"
        )
