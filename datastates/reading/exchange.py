"""Exchanges rows of matrices among the ranks of a host: each rank reads a share of the rows that several want.

It sends the other ranks their rows of its share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from datastates._base import log
from datastates._base.columns import I64
from datastates.errors import DeviceError
from datastates.executor.executor import FIRST_PEER, Columns, Executor, columns
from datastates.executor.executor import Exchange as NativeExchange
from datastates.planning import dividing
from datastates.planning.dividing import Parcel, Rows
from datastates.planning.several import FileRanges
from datastates.planning.wanted import Wanted, simplified
from datastates.ranks.neighbours import Listener
from datastates.reading.read_queue import ReadQueue
from datastates.state.runs import Runs
from datastates.storage import store_of
from datastates.storage.store import absent

MINIMUM = 8 << 20
"""Fewest bytes that a rank offers for exchange. For fewer, connecting takes longer than reading."""
PATIENCE = 30.0
"""Longest wait in seconds for a rank that does nothing: longer than storage takes for one read."""


def patience_of(timeout: float) -> float:
    """Seconds to wait for a rank that does nothing, when all ranks together may take ``timeout`` seconds to agree."""
    return min(PATIENCE, timeout / 8)


@dataclass(frozen=True, slots=True, eq=False)
class _File:
    """A file whose rows this rank offers for exchange.

    Attributes:
        queue: The file's reads.
        ranges: The ranges that this rank wants of the file.
        offered: Numbers of the ranges that are offered: rows with gaps between them.
        rows: The offered ranges, with their records.
    """

    queue: ReadQueue
    ranges: FileRanges
    offered: I64
    rows: Rows

    def memory(self, which: I64) -> Columns:
        """The memory of the destinations of the offered ranges number ``which``."""
        pointer, device, stream = self.queue.memory
        dest = self.ranges.dest[self.offered[which]]
        return pointer[dest], device[dest], stream[dest]


class Exchange:
    """One rank's part in an exchange. Not thread-safe.

    Rows that do not arrive are no error: the rank reads them by itself, see :meth:`rest`.
    """

    def __init__(self, listener: Listener, rank: int, patience: float, files: Mapping[str, _File]) -> None:
        self._listener = listener
        self._patience = patience
        self._rank = rank
        self._files = files
        self._names = {file.queue: name for name, file in files.items()}
        self._records: Mapping[str, I64] = {}  # by file, the numbers of the records that are exchanged
        self._own: Mapping[str, Parcel] = {}
        self._sent: list[dict[str, Parcel]] = []  # to each peer
        self._received: list[dict[str, Parcel]] = []  # from each peer
        self.native: NativeExchange | None = None
        self.extra_nbytes = 0
        """Bytes to read of the files by :meth:`reads` and :meth:`rest`, less the bytes that this rank itself wants."""

    @classmethod
    def offer(
        cls, queues: Iterable[ReadQueue], name: str, rank: int, patience: float, *, few: bool = False
    ) -> Exchange | None:
        """Offer the rows that this rank wants to the other ranks of the host.

        Args:
            queues: The reads of files.
            name: Name of the exchange: the same on all ranks, and used only once.
            rank: This rank's number.
            patience: Seconds to wait for another rank that does nothing.
            few: Whether to offer rows of fewer than :data:`MINIMUM` bytes, too.

        Returns:
            The exchange. None if there are too few rows, or if the system does not let ranks connect.
        """
        found = [_file(queue) for queue in queues if any(runs.has_gaps.any() for *_, runs in queue.runs)]
        offered = [file for file in found if file is not None]
        if not few and sum(int(file.rows.runs.size.sum()) for file in offered) < MINIMUM:
            return None
        try:
            # ranks may have the same file under different paths
            files = {}
            for file in offered:
                path = file.queue.source.path
                if (entry := store_of(path).look(path)) is None:
                    raise absent("stat", path)
                files[str(entry.place)] = file
            return cls(Listener(name, rank, patience), rank, patience, files)
        except OSError as error:
            log.info("reading without the other ranks of this host: %s", error)
            return None

    @property
    def host(self) -> str:
        """Name of the host: the same for all ranks that can exchange with each other."""
        return self._listener.host

    @property
    def queues(self) -> Collection[ReadQueue]:
        """The reads of the files whose rows are exchanged."""
        return [file.queue for name, file in self._files.items() if name in self._records]

    def meet(self, ranks: Sequence[int], executor: Executor, within: float | None = None) -> None:
        """Connect to the other ranks, and divide the rows that several want. If that fails, nothing is exchanged.

        Args:
            ranks: The ranks of this host that offer rows, this rank among them.
            executor: The executor that will read.
            within: Seconds in which each of the ranks will have called :meth:`offer`. None if all have.
        """
        wishes = {name: file.rows for name, file in self._files.items()}
        order = sorted(ranks)
        others = [rank for rank in order if rank != self._rank]
        with contextlib.ExitStack() as connected:
            connected.callback(self._listener.close)
            try:
                sockets = self._listener.connect(others, within)
                for one in sockets.values():
                    connected.enter_context(one)
                told = self._listener.swap(sockets, dividing.encode(wishes))
                every = {rank: dividing.decode(message) for rank, message in told.items()} | {self._rank: wishes}
                division = dividing.divide([every[rank] for rank in order])
                shares = dict(zip(order, division.shares, strict=True))
                received = [dividing.parcels(wishes, shares[peer]) for peer in others]
                rows = [self._filled(parcels) for parcels in received]
                self.native = executor.begin_exchange([sockets[peer] for peer in others], rows, self._patience)
            except Exception as error:  # the rank can read everything by itself
                log.info("reading without the other ranks of this host: %s", error)
                return
            self._records, self._received = division.records, received
            self._own = dividing.parcels(wishes, shares[self._rank])
            self._sent = [dividing.parcels(every[peer], shares[self._rank]) for peer in others]

    def _filled(self, parcels: Mapping[str, Parcel]) -> tuple[Columns, Runs]:
        """The places that a peer's parcels fill: the memory of each run's destination, and the runs."""
        none = np.zeros(0, np.int64)
        memory, parts = [columns([])], [Runs.single(none, none, none)]
        for name, parcel in parcels.items():
            memory.append(self._files[name].memory(parcel.which))
            parts.append(parcel.parts)
        pointer, device, stream = (np.concatenate(column) for column in zip(*memory, strict=True))
        return (pointer, device, stream), Runs.joined(parts)

    def reads(self, queue: ReadQueue) -> tuple[FileRanges, Columns] | None:
        """The ranges of a file that this rank reads for all ranks, with destinations; None if none were offered."""
        if (name := self._names.get(queue)) is None:
            return None
        file = self._files[name]
        ranges, memory, count = file.ranges, queue.memory, len(file.ranges.dest_nbytes)
        if name not in self._records:
            return ranges, memory
        kept = np.ones(len(ranges.wanted), bool)
        kept[file.offered[np.isin(file.rows.record, self._records[name])]] = False
        # each destination has a second number for its exchanged rows, which are all verified; then come the peers
        wanted, dest = [ranges.wanted[kept]], [ranges.dest[kept]]
        if (own := self._own.get(name)) is not None:
            wanted.append(own.parts)
            dest.append(count + ranges.dest[file.offered[own.which]])
        for n, parcels in enumerate(self._sent):
            if (parcel := parcels.get(name)) is not None:
                parts = parcel.parts
                wanted.append(replace(parts, dest=parcel.begin, dest_step=parts.length))
                dest.append(np.full(len(parts), 2 * count + n))
        peers, sent = len(self._sent), [_nbytes(parcels) for parcels in self._sent]
        result = replace(
            ranges,
            wanted=Runs.joined(wanted),
            dest=np.concatenate(dest).astype(np.int32),
            dest_nbytes=np.concatenate((ranges.dest_nbytes, ranges.dest_nbytes, np.array(sent, np.uint64))),
            in_place=np.concatenate((ranges.in_place, ranges.in_place, np.zeros(peers, np.uint8))),
            shared=False,
            whole=np.append(ranges.whole, np.ones(count + peers, np.uint8)),
        )
        self.extra_nbytes += _needed_nbytes(result) - _needed_nbytes(ranges)
        pointer, device, stream = (np.concatenate((column, column)) for column in memory)
        numbers = np.arange(FIRST_PEER, FIRST_PEER - peers, -1, dtype=np.int32)
        none = np.zeros(peers, np.uint64)
        return result, (np.append(pointer, none), np.append(device, numbers), np.append(stream, none))

    def finish(self) -> int:
        """Wait until each peer's parcels have arrived, or never will; returns the number of bytes that have arrived."""
        if self.native is None:
            return 0
        self.native.wait()
        return sum(_nbytes(parcels) for parcels, has in self._outcome() if has)

    def rest(self) -> Iterator[tuple[ReadQueue, FileRanges]]:
        """The ranges of each file that have not arrived, for this rank to read."""
        lost = [parcels for parcels, has in self._outcome() if not has]
        for name, file in self._files.items():
            found = [parcels[name] for parcels in lost if name in parcels]
            if found:
                dest = file.ranges.dest[file.offered[np.concatenate([parcel.which for parcel in found])]]
                ranges = replace(file.ranges, wanted=Runs.joined([parcel.parts for parcel in found]), dest=dest)
                self.extra_nbytes += _needed_nbytes(ranges)
                yield file.queue, ranges

    def _outcome(self) -> Iterator[tuple[dict[str, Parcel], bool]]:
        """The parcels that each peer was to send, by file, and whether they have arrived."""
        return zip(self._received, [] if self.native is None else self.native.arrived(), strict=True)

    def close(self) -> None:
        """End the exchange. Rows that have not arrived by now are lost, here and at the other ranks."""
        self._listener.close()
        if self.native is not None:
            self.native.close()
            with contextlib.suppress(DeviceError):  # finish() raises it
                self.native.wait()  # afterwards nothing is written to memory
            self.native = None


def _needed_nbytes(ranges: FileRanges) -> int:
    _, runs = simplified(ranges.dest, ranges.wanted)
    return Wanted.of(runs, ranges.chunks).needed_nbytes


def _nbytes(parcels: Mapping[str, Parcel]) -> int:
    return sum(int(parcel.parts.size.sum()) for parcel in parcels.values())


def _file(queue: ReadQueue) -> _File | None:
    """Choose the rows to offer of a file: rows with gaps, in chunks with checksums. None if there are none."""
    ranges = queue.wanted(straight=True)
    offered = np.flatnonzero(ranges.wanted.has_gaps)
    if not ranges.chunks.checked or not len(offered):
        return None
    rows = ranges.wanted[offered]
    record = np.searchsorted(queue.source.data_offset, rows.source.astype(np.uint64), side="right") - 1
    return _File(queue, ranges, offered, Rows(record.astype(np.int64), rows))
