"""The storage reader of torch.distributed.checkpoint: ranges of files into place, verified, instead of whole chunks."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from datastates import arrays, container, gate
from datastates.config import IoSettings
from datastates.engine import make_executor
from datastates.errors import FormatError, StorageError
from datastates.executor import read_bytes
from datastates.opened import Container, open_container
from datastates.reads import Reads, Tally
from datastates.shard_table import Row


class DataStatesStorageReader(FileSystemReader):
    """Loads checkpoints of :class:`DataStatesStorageWriter`, and those of torch's own writer, for ``dcp.load``.

    Of this package's files only what is needed is read, all of it at once, coalesced, straight into the tensors, and
    compared with its checksums. Files of torch's writer have none, and are read as torch reads them.
    """

    def __init__(self, path: str | os.PathLike[str] = "", **options: Any) -> None:
        """Read from ``path``, or from what ``checkpoint_id`` names.

        Args:
            path: The checkpoint's directory.
            **options: Fields of :class:`~datastates.config.IoSettings`.

        Raises:
            SettingsError: An option is unknown or impossible.
        """
        super().__init__(path)
        self.settings = IoSettings.of(options)
        self.tally: Tally | None = None
        """What the last load read of this package's files."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan needs into the tensors that the planner names.

        Raises:
            CorruptError: Bytes do not match their checksum; the message names the tensor. Some tensors are overwritten.
            FormatError: A file is damaged.
            StorageError: Reading failed.
        """
        gate.pass_all()  # loading changes the state, too
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            per_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        reads, foreign, ends = Reads(in_full=True), [], []
        for name, items in per_file.items():
            source = self._open(Path(self.path) / name, items)
            if source is None:
                foreign += items
            else:
                ends += [self._queue(reads, source, item, planner) for item in items]
        executor = make_executor(self.settings, reads.nbytes)
        try:
            self.tally = reads.run(executor)
        finally:
            executor.close()
        for end in ends:
            end()
        return super().read_data(dataclasses.replace(plan, items=foreign), planner)

    def _open(self, path: Path, items: Sequence[ReadItem]) -> Container | None:
        """A file of this package's; None where it is another's."""
        try:
            nbytes = path.stat().st_size
        except OSError as error:
            raise StorageError(error.errno or 0, "stat", str(path)) from error
        places = [self.storage_data[item.storage_index] for item in items]
        if (end := max(place.offset + place.length for place in places)) > nbytes:
            raise FormatError(f"{path} has {nbytes} bytes and should have {end}: it was cut short")
        tail = min(nbytes, container.FOOTER_NBYTES + 4096)
        return open_container(path) if container.is_ending(read_bytes(path)(nbytes - tail, tail)) else None

    def _queue(self, reads: Reads, source: Container, item: ReadItem, planner: LoadPlanner) -> Callable[[], None]:
        """Plan to read one item; returns what is to be done once it has been read."""
        index, place = source.index, self.storage_data[item.storage_index]
        if item.type == LoadItemType.BYTE_IO:
            if place.offset not in index.data_offset:
                raise FormatError(f"{source.path} holds nothing at byte {place.offset}, where {_name(item)} should be")
            data = np.empty(place.length, np.uint8)
            reads.add_memory(source, place.offset, arrays.memory(data))
            return lambda: planner.load_bytes(item, io.BytesIO(data.tobytes()))
        row = _row_at(source, place.offset)
        if row is None or row.box is None:
            raise FormatError(f"{source.path} holds no tensor at byte {place.offset}, where {_name(item)} should be")
        target = planner.resolve_tensor(item).detach()
        if target.shape != item.lengths:
            raise ValueError(
                f"{_name(item)}: {tuple(item.lengths)} of it go to a tensor of shape {tuple(target.shape)}"
            )
        dtype = getattr(torch, row.dtype.name)
        landing = target if target.dtype == dtype else torch.empty(item.lengths, dtype=dtype)
        live = arrays.destination(row.key, landing)
        offset = tuple(first + begin for first, begin in zip(row.box, item.storage_offsets, strict=True))
        reads.add(source, row, replace(live, global_shape=row.global_shape, offset=offset))

        def end() -> None:
            if landing is not target:
                target.copy_(landing)
            planner.commit_tensor(item, target)

        return end


def _name(item: ReadItem) -> str:
    return repr(item.storage_index.fqn)


def _row_at(source: Container, offset: int) -> Row | None:
    """The array whose archive begins there."""
    table = source.index.shards
    record = int(np.searchsorted(source.index.header_offset, np.uint64(offset)))
    found = np.flatnonzero(table.record == record)
    at = record < len(source.index.header_offset) and int(source.index.header_offset[record]) == offset
    return table.row(int(found[0])) if at and len(found) else None
