"""Copies tensors of a checkpoint into one file, window by window, and proves each by its digest."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from datastates._base.columns import U32
from datastates._base.sizes import PAGE
from datastates._base.tasks import Task
from datastates._base.workers import Workers
from datastates.container import checksums
from datastates.container.named_tensor import Tensor
from datastates.container.table import Row
from datastates.errors import CorruptError
from datastates.executor.executor import Executor
from datastates.exporting.layouts import File
from datastates.reading.reads import Reads
from datastates.reading.tensors import TensorFile
from datastates.state import arrays, memory, strides
from datastates.state.dtypes import BY_NAME, pickled
from datastates.state.shards import ArrayRef
from datastates.state.strides import is_row_major
from datastates.storage import FileWriter, Folders, Writer, store_of
from datastates.storage.location import Location

SHORTEST = 1 << 20
"""Bytes from which on a stretch is shared. Sharing many short ones would make a file of many extents."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Whole pages that a file of the checkpoint and the exported file have in common.

    Attributes:
        path: The file of the checkpoint.
        offset: Offset in the checkpoint's file, in bytes.
        at: Offset in the exported file, in bytes.
        nbytes: Its length in bytes.
    """

    path: Location
    offset: int
    at: int
    nbytes: int


def stretch_of(source: TensorFile, row: Row, begin: int, end: int, at: int) -> Stretch | None:
    """The stretch of a tensor's range that can be shared; None if nothing can.

    Only files whose chunks have checksums are shared: a committed checkpoint does not change after it was verified.

    Args:
        source: A file of the checkpoint.
        row: A row of it with elements of the tensor.
        begin: First element of the range, in the flattened tensor.
        end: One past the last element of the range.
        at: Offset of the range in the exported file, in bytes.
    """
    first, last = row.part.bounds
    if not (source.checked and last - first == row.part.numel and is_row_major(row.shape, row.stride)):
        return None
    itemsize = row.dtype.itemsize
    low, high = max(begin, first), min(end, last)
    offset = int(source.data_offset[row.record]) + row.offset + (low - first) * itemsize
    at += (low - begin) * itemsize
    skipped = -at % PAGE
    nbytes = ((high - low) * itemsize - skipped) // PAGE * PAGE
    if (offset - at) % PAGE or nbytes < SHORTEST:
        return None
    return Stretch(source.path, offset + skipped, at + skipped, nbytes)


class Sharing:
    """Shares stretches with one exported file, until the store refuses. With an object, nothing is shared."""

    def __init__(self, target: Writer) -> None:
        """Begin to share with the file ``target``."""
        self._target = target if isinstance(target, FileWriter) else None

    def share(self, stretches: Sequence[Stretch]) -> Iterator[tuple[int, int]]:
        """Share stretches with the file; yields the ranges of the file in bytes that are filled thereby, ascending."""
        for one in sorted(stretches, key=lambda one: one.at):
            if self._target is None or not self._target.share(one.path, one.offset, one.nbytes, one.at):
                self._target = None
                return
            yield one.at, one.at + one.nbytes


BUFFERS = 3
"""Windows of a file that are under way at once: one is read, one is checked, one is written."""
ALIGNMENT = 16
"""Alignment in bytes of elements before a cast."""
MOST_MEMORY = 48 << 20
"""Bytes of all windows that are under way, with the elements that are cast for them."""


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The stored elements of a tensor that is exported.

    Attributes:
        row: Any stored row of the tensor.
        sources: The rows that hold its elements, each with its file.
        digest: The CRC-32 of the stored elements in row-major order; None if the checkpoint has none.
    """

    row: Row
    sources: Sequence[tuple[TensorFile, Row]]
    digest: int | None


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A range of a tensor's elements that a window holds.

    Attributes:
        number: The number of the tensor in the file.
        end: One past the last element, in the flattened tensor.
        read: The elements with their stored type.
        cast: The elements with their type in the file; None if they are not cast.
    """

    number: int
    end: int
    read: Any
    cast: Any = None


@dataclass(slots=True, eq=False)
class _Window:
    """An extent of the exported file in memory, and memory for elements that are cast into it.

    Attributes:
        number: The number of the extent.
        offset, nbytes: Its range in the file, in bytes.
        block, base: The memory, and the offset in it, on a page, where the range begins.
        staging, staged: Memory for elements before a cast, and its bytes in use.
        reads: The reads that fill it.
        pieces: The ranges of tensors in it.
        stretches: The stretches of it that may share blocks with the checkpoint.
    """

    number: int
    offset: int
    nbytes: int
    block: Any
    base: int
    staging: Any
    reads: Reads
    staged: int = 0
    pieces: list[_Piece] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)

    @property
    def bytes(self) -> Any:
        """The window's memory."""
        block = self.block if isinstance(self.block, np.ndarray) else self.block.numpy()
        return block[self.base : self.base + self.nbytes]

    def stage(self, ref: ArrayRef) -> Any:
        """Take an array for the elements of ``ref`` from the memory for elements before a cast."""
        begin = -(-self.staged // ALIGNMENT) * ALIGNMENT
        self.staged = begin + memory.nbytes_of(ref)
        return memory.view(self.staging, ref, begin)


class Copier:
    """Copies the tensors of a checkpoint into files. Not thread-safe."""

    def __init__(
        self,
        origins: Mapping[str, Origin],
        executor: Executor,
        *,
        direct_io: bool,
        progress: Callable[[int], object],
    ) -> None:
        """Remember the tensors to export; nothing is read yet.

        Args:
            origins: The origin of each tensor, by full key.
            executor: Reads the checkpoint.
            direct_io: Whether to write past the page cache where the file system can.
            progress: Called with the number of bytes after each write.
        """
        self._origins = origins
        self._executor = executor
        self._direct_io = direct_io
        self._progress = progress

    def copy(self, path: Location, file: File) -> None:
        """Write one file, from its beginning to its end, and sync it.

        Args:
            path: The new file, or an object.
            file: Its layout.

        Raises:
            CorruptError: Bytes do not match a checksum, or a tensor does not match its digest; the message names it.
            FormatError: A file of the checkpoint is damaged.
            StorageError: A system call failed.
        """
        plan = file.plan
        size = -(-int(plan.extent_length.max(initial=0)) // PAGE) * PAGE
        count = len(plan.extent_offset)
        ratio, cast = _growth([(self._stored_type(t), t.dtype) for t in file.tensors])
        staging = int(size * ratio) + ALIGNMENT * cast
        rooms = [(memory.allocate("torch", size + PAGE), memory.allocate("torch", staging)) for _ in range(BUFFERS)]
        written: list[Task[None]] = []
        writer = Workers("datastates-export", 1)
        reading: deque[Reads] = deque(maxlen=2)  # reads under way; older ones are forgotten with their windows
        # CRC-32 of each tensor as far as it was read: as stored, and as written (of cast tensors, where files have it)
        sums = np.zeros((2, len(file.tensors)), np.uint32)
        with (
            contextlib.closing(self._writer(path)) as target,
            contextlib.ExitStack() as at_end,
        ):

            @at_end.callback
            def stop() -> None:
                for task in written:
                    task.take()  # after a failure, no more is written
                writer.stop()
                writer.join()
                for reads in reading:
                    reads.close()

            sharing = Sharing(target)

            def begin(number: int) -> _Window:
                if number >= BUFFERS:
                    written[number - BUFFERS].result()
                window = self._window(file, number, *rooms[number % BUFFERS])
                reading.append(window.reads)
                window.reads.start(self._executor)
                return window

            upcoming = begin(0)
            for number in range(count):
                window = upcoming
                if number + 1 < count:
                    upcoming = begin(number + 1)
                window.reads.finish()
                self._check(file, window, sums)
                written.append(Task(partial(self._write, target, window, sharing)))
                writer.put(written[-1])
            for done in written:
                done.result()
            if file.tail_nbytes:
                target.write(file.encode_tail(sums[1]), plan.end)
                self._progress(file.tail_nbytes)
            target.finish()

    def _writer(self, path: Location) -> Writer:
        store = store_of(path)
        return store.writer(path, direct=self._direct_io) if isinstance(store, Folders) else store.writer(path)

    def _stored_type(self, tensor: Tensor) -> str:
        return pickled(self._origins[tensor.key].row.dtype).name

    def _window(self, file: File, number: int, block: Any, staging: Any) -> _Window:
        """Lay a window out, and queue its reads."""
        plan = file.plan
        offset, nbytes = int(plan.extent_offset[number]), int(plan.extent_length[number])
        base = -arrays.address(block) % PAGE
        window = _Window(number, offset, nbytes, block, base, staging, Reads(in_full=True))
        pieces = slice(int(plan.extent_piece[number]), int(plan.extent_piece[number + 1]))
        columns = plan.piece_source, plan.piece_source_offset, plan.piece_extent_offset, plan.piece_length
        for source, begin, at, length in zip(*(column[pieces].tolist() for column in columns), strict=True):
            if source < 0:
                window.bytes[at : at + length] = np.frombuffer(file.literal, np.uint8, length, begin)
            else:
                self._queue(window, file, source, begin, begin + length, base + at)
        return window

    def _queue(self, window: _Window, file: File, number: int, begin: int, end: int, at: int) -> None:
        """Queue the reads of a range of a tensor's bytes, to byte ``at`` of the window's block."""
        tensor = file.tensors[number]
        origin, stored = self._origins[tensor.key], self._stored_type(tensor)
        itemsize = BY_NAME[tensor.dtype].itemsize
        begin, end = begin // itemsize, end // itemsize
        whole = end - begin == math.prod(tensor.shape)
        shape = tensor.shape if whole else (end - begin,)
        stride = strides.row_major(shape)
        place = memory.view(window.block, ArrayRef(tensor.key, "torch", tensor.dtype, shape, stride), at)
        is_cast = stored != tensor.dtype
        array = window.stage(ArrayRef(tensor.key, "torch", stored, shape, stride)) if is_cast else place
        live = arrays.destination(tensor.key, array)
        if not whole:
            live = replace(live, global_shape=tensor.shape, offset=None, flat=(begin, end))
        for source, stored_row in origin.sources:
            row = replace(stored_row, dtype=pickled(stored_row.dtype))
            window.reads.add(source, row, live)
            if not is_cast and (found := stretch_of(source, row, begin, end, window.offset + at - window.base)):
                window.stretches.append(found)
        window.pieces.append(_Piece(number, end, array, place if is_cast else None))

    def _check(self, file: File, window: _Window, sums: U32) -> None:
        """Compare the digests of the tensors that end in a window, cast elements, and fill in checksums."""
        as_stored, as_written = sums
        for piece in window.pieces:
            tensor = file.tensors[piece.number]
            key, origin = tensor.key, self._origins[tensor.key]
            found = as_stored[piece.number] = checksums.crc32(_as_bytes(piece.read), int(as_stored[piece.number]))
            if piece.end == math.prod(tensor.shape) and origin.digest is not None and found != origin.digest:
                path = str(origin.sources[0][0].path)
                raise CorruptError(f"{key!r} from {path} does not match its digest", key=key, path=path)
            if piece.cast is not None:
                memory.convert(piece.cast, piece.read)
                if file.tail_nbytes:
                    found = checksums.crc32(_as_bytes(piece.cast), int(as_written[piece.number]))
            as_written[piece.number] = found
        plan = file.plan
        patches = slice(*np.searchsorted(plan.patch_extent, [window.number, window.number + 1]).tolist())
        places = plan.patch_offset[patches].astype(np.int64)[:, None] + np.arange(4)
        window.bytes[places] = as_written[plan.patch_source[patches], None].astype("<u4").view(np.uint8)

    def _write(self, target: Writer, window: _Window, sharing: Sharing) -> None:
        """Write the parts of a window that do not share blocks with the checkpoint."""
        data, at = window.bytes, 0
        for begin, end in [*sharing.share(window.stretches), (window.offset + len(data),) * 2]:
            target.write(memoryview(data[at : begin - window.offset]), window.offset + at)
            at = end - window.offset
        self._progress(window.nbytes)


def _growth(types: Sequence[tuple[str, str]]) -> tuple[float, int]:
    """The most bytes of stored elements for each byte of cast elements, and the number of tensors that are cast.

    Args:
        types: The stored type of each tensor, and its type in the file.
    """
    ratios = [BY_NAME[stored].itemsize / BY_NAME[to].itemsize for stored, to in types if stored != to]
    return max(ratios, default=0.0), len(ratios)


def window_nbytes(types: Sequence[tuple[str, str]]) -> int:
    """Length of a window in bytes, a power of two. BUFFERS windows and elements cast for them take MOST_MEMORY at most.

    Args:
        types: The stored type of each tensor, and its type in the file.
    """
    return 1 << math.floor(math.log2(MOST_MEMORY / BUFFERS / (1 + _growth(types)[0])))


def _as_bytes(array: Any) -> Any:
    """The bytes of a contiguous array, without a copy."""
    if arrays.kind_of(array) == "torch":
        import torch

        return array.reshape(-1).view(torch.uint8).numpy()
    return array.reshape(-1).view(np.uint8)
