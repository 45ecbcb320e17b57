"""Reads items of files of torch.distributed.checkpoint by their places: this package's files, and torch's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from datastates._base import gc_pause
from datastates.config import IoSettings
from datastates.container.file import Container, open_container
from datastates.errors import FormatError
from datastates.executor.make import make_executor
from datastates.formats import own
from datastates.formats.dcp_own_file import OwnFile
from datastates.formats.dcp_stock_file import StockFile
from datastates.formats.dcp_wanted import ClaimedMemory, Wanted
from datastates.reading.reads import Reads, Tally
from datastates.storage import Location, store_of


class PlacedReads:
    """One load: :meth:`add` items, :meth:`read` them all, and :meth:`hand_over`. Not thread-safe."""

    def __init__(self) -> None:
        """Begin without items."""
        self._reads = Reads(in_full=True)
        self._claims = ClaimedMemory()
        self._stock: list[StockFile] = []
        self._ends: list[Callable[[], None]] = []

    def add(self, path: Location, wanted: Sequence[Wanted]) -> list[int]:
        """Plan to read items of a file; returns the numbers of those that torch's own code must read.

        Raises:
            FormatError: The file holds something else, or is cut short or damaged; the message names it.
            StorageError: Reading failed.
            ValueError: A tensor has another shape than its item.
        """
        source = self._open(path, wanted)
        file: OwnFile | StockFile
        if source is not None:
            file = OwnFile(source, wanted)
        else:
            file = StockFile(path, store_of(path).length(path), wanted, self._claims)
            self._stock.append(file)
        ends = [file.queue(self._reads, one) for one in wanted]
        self._ends += filter(None, ends)
        return [number for number, end in enumerate(ends) if end is None]

    def _open(self, path: Location, wanted: Sequence[Wanted]) -> Container | None:
        """Open a file of this package; None for one of torch's."""
        nbytes = store_of(path).length(path)
        last = max(wanted, key=lambda one: sum(one.place))
        if (end := sum(last.place)) > nbytes:
            raise FormatError(
                f"{path} has {nbytes} bytes and should have {end}, where {last.name} ends: it was cut short"
            )
        if own.has_ending(path):
            return open_container(path)
        if own.has_beginning(path):
            raise FormatError(f"{path} was cut short, or is damaged at its end")
        return None

    def read(self, settings: IoSettings) -> Tally:
        """Read and verify everything; returns the amount.

        Raises:
            CorruptError: Bytes do not match their checksum; the message names the tensor. Some tensors are overwritten.
            StorageError: Reading failed.
        """
        reads = self._reads
        # the reads are closed first
        with contextlib.closing(make_executor(settings, reads.nbytes)) as executor, contextlib.closing(reads):
            with gc_pause.paused():
                reads.start(executor)
            tally = reads.finish()
        for file in self._stock:
            tally = file.verify(tally)
        return tally

    def hand_over(self) -> None:
        """Copy what could not be read in place, and hand each item over."""
        for end in self._ends:
            end()
