"""The storage reader for torch.distributed.checkpoint: reads and verifies just the ranges that are needed."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from typing_extensions import Unpack

from datastates._base import gc_pause
from datastates.adapters.dcp import metadata_file
from datastates.adapters.dcp.load.exchanged_plan import ExchangedPlan
from datastates.adapters.dcp.load.read_items import name_of, wanted_of
from datastates.adapters.dcp.store_files import StoreFiles
from datastates.adapters.shared.tried import warn_of_untried
from datastates.config import IoOptions, IoSettings
from datastates.errors import FormatError
from datastates.formats.dcp_reads import PlacedReads
from datastates.reading.reads import Tally
from datastates.saving import gate
from datastates.storage import Location


class DataStatesStorageReader(FileSystemReader):
    """Loads checkpoints of :class:`DataStatesStorageWriter` and of torch's own writer, for ``dcp.load``.

    It reads only the ranges that are needed, coalesced, straight into the tensors.

    All data that is read from this package's files is verified by checksums. From torch's files, a tensor is verified
    if it is loaded as a whole and has a checksum. Items that torch did not write by ``torch.save`` of a plain tensor
    are read by torch's own code.
    """

    def __init__(
        self, path: str | os.PathLike[str] = "", _extension_registry: Any = None, **options: Unpack[IoOptions]
    ) -> None:
        """Read from ``path``, or from the ``checkpoint_id`` that is given to ``dcp.load``.

        Args:
            path: The checkpoint's directory, or its address in a store.
            _extension_registry: As of torch's own reader: the extensions that may have transformed torch's files.
            **options: Fields of :class:`~datastates.config.IoSettings`.

        Raises:
            SettingsError: An option is unknown or its value is invalid.
            ValueError: ``path`` is an address that no store serves.
        """
        super().__init__("", _extension_registry)
        warn_of_untried("torch")
        self.fs = StoreFiles()
        self.path = self.fs.init_path(path)
        self.settings = IoSettings.of(options)
        self.tally: Tally | None = None
        """The amount that the last load read, without items that torch's own code read; None before the first load."""

    @gc_pause.paused()
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata``, which names the file and the place of each item.

        Returns:
            The metadata.

        Raises:
            FileNotFoundError: There is no such checkpoint.
            FormatError: ``.metadata`` is damaged.
        """
        try:
            return super().read_metadata(*args, **kwargs)
        except OSError:
            raise
        except Exception as error:
            path = metadata_file.path_of(Location(self.path), kwargs.get("rank"))
            raise FormatError(f"{path} cannot be read: {type(error).__name__}: {error}") from error

    @gc_pause.paused()
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan in a form that is cheap to exchange."""
        prepared = super().prepare_local_plan(plan)
        # a planner's own type keeps its own way to be pickled
        return ExchangedPlan.of(prepared) if type(prepared) is LoadPlan else prepared

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan into the tensors that the planner names. Everything is read when this returns.

        Args:
            plan: The items.
            planner: Resolves each item to a tensor, or takes its bytes.

        Returns:
            A future that is done already.

        Raises:
            ValueError: A tensor has another shape than its item.
            CorruptError: Bytes do not match their checksum; the message names the tensor. Some tensors are overwritten.
            FormatError: A file is damaged.
            StorageError: Reading failed.
        """
        gate.pass_all()  # loading changes the state: pending snapshots capture it first
        self.tally = None
        reads = PlacedReads()
        foreign = self._queue(reads, plan, planner)
        self.tally = reads.read(self.settings)
        reads.hand_over()
        for item in foreign:
            self._read_by_torch(plan, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @gc_pause.paused()
    def _queue(self, reads: PlacedReads, plan: LoadPlan, planner: LoadPlanner) -> list[ReadItem]:
        """Queue the reads of a plan's items; returns those that torch's own code must read."""
        names: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            names.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        files: dict[Location, list[ReadItem]] = {}
        for name, items in names.items():  # a file may have several names, as x and ./x
            files.setdefault(Location(self.path) / name, []).extend(items)
        foreign: list[ReadItem] = []
        for path, items in files.items():
            wanted = [wanted_of(item, self.storage_data[item.storage_index], planner) for item in items]
            foreign += [items[number] for number in reads.add(path, wanted)]
        return foreign

    def _read_by_torch(self, plan: LoadPlan, item: ReadItem, planner: LoadPlanner) -> None:
        """Let torch read the whole stored part of an item; an error names the item."""
        try:
            super().read_data(dataclasses.replace(plan, items=[item]), planner)
        except (OSError, ValueError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            path = Location(self.path) / self.storage_data[item.storage_index].relative_path
            raise FormatError(f"{name_of(item)} in {path} cannot be read: {type(error).__name__}: {error}") from error
