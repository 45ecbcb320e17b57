"""A file of this package in a checkpoint of torch.distributed.checkpoint: its arrays for the wanted items."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import numpy as np

from datastates.container.file import Container
from datastates.container.table import Row
from datastates.errors import FormatError
from datastates.formats.dcp_wanted import Wanted, queue_box
from datastates.reading.reads import Reads
from datastates.state import arrays
from datastates.state.runs import pairs


class OwnFile:
    """A file of this package, and its arrays at the places that the checkpoint's metadata names."""

    def __init__(self, source: Container, wanted: Sequence[Wanted]) -> None:
        """Find the arrays of the wanted items in an opened container."""
        self.source = source
        shards, records = source.index.shards, source.index.records
        offset = np.unique(np.array([one.place[0] for one in wanted if one.place[0] >= 0], np.uint64))
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

    def queue(self, reads: Reads, wanted: Wanted) -> Callable[[], None]:
        """Plan to read and verify one item.

        Args:
            reads: The reads of this load, to add to.
            wanted: The item.

        Returns:
            A function to call once the item has been read.

        Raises:
            FormatError: The file holds something else at that place, or nothing.
            ValueError: The tensor has another shape than the item.
        """
        row = self._row(wanted)
        if row.kind != "numpy":
            return queue_box(reads, self.source, row, wanted)
        data = np.empty(wanted.place[1], np.uint8)
        reads.add_memory(self.source, wanted.place[0], arrays.memory(data))
        return lambda: wanted.take(io.BytesIO(data.tobytes()))

    def _row(self, wanted: Wanted) -> Row:
        """The array at the item's place, where its archive or its bare bytes begin."""
        rows = self._rows.get(wanted.place[0], [])
        for row in rows:
            # the pickled bytes of an object, or of a tensor that consists of others
            alike = row.kind == "numpy" or (not wanted.is_bytes and row.box == wanted.begin)
            if alike and wanted.is_stored_as(row.key):
                return row
        there = f"{rows[0].key!r} of {rows[0].box}" if rows else "nothing"
        where = f"at byte {wanted.place[0]}, where {wanted.name} should be"
        raise FormatError(f"{self.source.path} holds {there} {where}: it is another file")
