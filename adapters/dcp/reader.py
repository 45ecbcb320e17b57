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
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from datastates import arrays, container, gate
from datastates.adapters.dcp import metadata_file
from datastates.adapters.dcp.items import is_key_of
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

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read which files hold what.

        Raises:
            FileNotFoundError: There is no such checkpoint.
            FormatError: ``.metadata`` is damaged.
        """
        try:
            return super().read_metadata(*args, **kwargs)
        except OSError:
            raise
        except Exception as error:
            path = metadata_file.path_of(Path(self.path), kwargs.get("rank"))
            raise FormatError(f"{path} cannot be read: {type(error).__name__}: {error}") from error

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

    def _open(self, path: Path, items: Sequence[ReadItem]) -> _File | None:
        """A file of this package's; None where it is another's."""
        try:
            nbytes = path.stat().st_size
        except OSError as error:
            raise StorageError(error.errno or 0, "stat", str(path)) from error
        places = [self.storage_data[item.storage_index] for item in items]
        if (end := max(place.offset + place.length for place in places)) > nbytes:
            raise FormatError(f"{path} has {nbytes} bytes and should have {end}: it was cut short")
        read, tail = read_bytes(path), min(nbytes, container.FOOTER_NBYTES + 4096)
        if container.is_ending(read(nbytes - tail, tail)):
            return _File(open_container(path))
        if container.is_beginning(read(0, min(nbytes, 64))):
            raise FormatError(f"{path} was cut short, or is damaged at its end")
        return None

    def _queue(self, reads: Reads, file: _File, item: ReadItem, planner: LoadPlanner) -> Callable[[], None]:
        """Plan to read one item; returns what is to be done once it has been read."""
        place = self.storage_data[item.storage_index]
        row = file.row(place.offset, item)
        if item.type == LoadItemType.BYTE_IO:
            data = np.empty(place.length, np.uint8)
            reads.add_memory(file.source, place.offset, arrays.memory(data))
            return lambda: planner.load_bytes(item, io.BytesIO(data.tobytes()))
        assert row.box is not None
        target = planner.resolve_tensor(item).detach()
        if target.shape != item.lengths:
            raise ValueError(
                f"{_name(item)}: {tuple(item.lengths)} of it go to a tensor of shape {tuple(target.shape)}"
            )
        dtype = getattr(torch, row.dtype.name)
        is_memory = target.dtype == dtype and arrays.kind_of(target) is not None
        landing = target if is_memory else torch.empty(item.lengths, dtype=dtype)
        live = arrays.destination(row.key, landing)
        offset = tuple(first + begin for first, begin in zip(row.box, item.storage_offsets, strict=True))
        reads.add(file.source, row, replace(live, global_shape=row.global_shape, offset=offset))

        def end() -> None:
            if landing is not target:
                target.copy_(landing)
            planner.commit_tensor(item, target)

        return end


class _File:
    """A file of this package's, and which arrays lie in which of its records."""

    def __init__(self, source: Container) -> None:
        self.source = source
        record = source.index.shards.record
        self._rows = np.argsort(record, kind="stable")
        self._first = np.searchsorted(record[self._rows], np.arange(len(source.index.data_offset) + 1))

    def row(self, offset: int, item: ReadItem) -> Row:
        """The array that the checkpoint's metadata says is there: an archive begins before its data, bytes with it.

        Raises:
            FormatError: The file holds something else at that place, or nothing.
        """
        index = self.source.index
        is_bytes = item.type == LoadItemType.BYTE_IO
        rows: list[Row] = []
        # the first record whose data ends behind that
        record = int(np.searchsorted(index.data_offset + index.record_nbytes, np.uint64(offset), "left"))
        if record < len(index.data_offset) and index.header_offset[record] <= offset <= index.data_offset[record]:
            numbers = self._rows[self._first[record] : self._first[record + 1]]
            rows = [index.shards.row(number) for number in numbers.tolist()]
        for row in rows:
            alike = row.kind == "numpy" if is_bytes else row.box == _begin(item)
            if alike and is_key_of(row.key, item.storage_index):
                return row
        there = f"{rows[0].key!r} of {rows[0].box}" if rows else "nothing"
        raise FormatError(
            f"{self.source.path} holds {there} at byte {offset}, where {_name(item)} should be: it is another file"
        )


def _begin(item: ReadItem) -> tuple[int, ...]:
    return tuple(item.storage_index.offset or ())


def _name(item: ReadItem) -> str:
    begin = _begin(item)
    return f"{item.storage_index.fqn!r}" + (f" of {begin}" if any(begin) else "")
