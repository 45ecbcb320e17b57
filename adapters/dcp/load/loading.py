"""One load of a plan: the file that is read ahead while the ranks exchange their plans, and the executor that reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from datastates.adapters.dcp.load.read_items import nbytes_of
from datastates.container.file import Container
from datastates.errors import DatastatesError
from datastates.executor.executor import Executor
from datastates.reading.reads import AHEAD_MINIMUM, Reads
from datastates.state.devices import current_device
from datastates.storage import Location

Place = tuple[ReadItem, _StorageInfo]
"""An item, and its place from the checkpoint's metadata."""
AHEAD_SHARE = 0.9
"""Smallest share of a file that a plan must want for the file to be read ahead: all of its first extents are read."""


class Loading:
    """The reads of one load, from the first plan on. Not thread-safe.

    Attributes:
        reads: The reads.
        ahead: The file that is read ahead; None if none is.
    """

    def __init__(self, executor: Callable[[int], Executor]) -> None:
        """Begin without reads. ``executor`` makes an executor for reading so many bytes."""
        self.reads = Reads(in_full=True)
        self.ahead: Container | None = None
        self._make_executor = executor
        self._executor: Executor | None = None

    def begin(
        self,
        files: dict[Location, list[Place]],
        metadata: Metadata,
        open_file: Callable[[Location, Sequence[Place]], Container | None],
    ) -> None:
        """Begin to read the file with the most wanted bytes, if this package wrote it and it is wanted nearly whole.

        Not if CUDA is in use: the host cache must be page-locked first, which takes as long as the ranks do. A file
        that cannot be opened is left to the load, which reports it.

        Args:
            files: The wanted items by file.
            metadata: The checkpoint's metadata.
            open_file: Opens a file of the checkpoint for these items; None if it is not one of this package's.
        """
        wanted = {path: sum(nbytes_of(*place, metadata) for place in places) for path, places in files.items()}
        if not wanted or current_device() is not None:
            return
        path = max(wanted, key=wanted.__getitem__)
        if wanted[path] < AHEAD_MINIMUM:
            return
        with contextlib.suppress(DatastatesError):
            source = open_file(path, files[path])
            if source is not None and wanted[path] >= AHEAD_SHARE * source.nbytes:
                self._executor = self._make_executor(sum(wanted.values()))
                self.reads.begin(source, self._executor)
                self.ahead = source

    def executor(self) -> Executor:
        """The executor for the reads."""
        if self._executor is None:
            self._executor = self._make_executor(self.reads.nbytes)
        return self._executor

    def close(self) -> None:
        """Stop the reads under way, and free the host cache. Idempotent."""
        self.reads.close()
        if self._executor is not None:
            self._executor.close()
