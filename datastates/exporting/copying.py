"""Copies tensors of a checkpoint into one file, window by window, and proves each by its digest."""

from __future__ import annotations

import contextlib
import errno
import math
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from datastates._base import files
from datastates._base.sizes import PAGE
from datastates.container import checksums
from datastates.container.safetensors_header import Tensor
from datastates.container.table import Row
from datastates.errors import CorruptError, StorageError
from datastates.executor.executor import Executor
from datastates.exporting.safetensors_layout import File
from datastates.restoring.reads import Reads
from datastates.restoring.sources import TensorFile
from datastates.state import arrays, memory, strides
from datastates.state.dtypes import BY_NAME
from datastates.state.shards import ArrayRef

BUFFERS = 3
"""Windows of a file that are under way at once: one is read, one is checked, one is written."""
ALIGNMENT = 16
"""Alignment in bytes of elements before a cast."""
MOST_MEMORY = 48 << 20
"""Bytes of all windows that are under way, with what is cast for them."""


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Where the elements of a tensor come from.

    Attributes:
        row: Any stored row of the tensor.
        sources: The rows that hold its elements, each with its file.
        digest: The CRC-32 of the stored elements in row-major order; None if it was not stored.
    """

    row: Row
    sources: Sequence[tuple[TensorFile, Row]]
    digest: int | None


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A range of a tensor's elements in a window: what is read, and where in the file it goes if it is cast."""

    tensor: Tensor
    begin: int
    end: int
    read: Any
    cast: Any = None


@dataclass(slots=True, eq=False)
class _Window:
    """A range of the file in memory, and memory for what is cast into it.

    Attributes:
        offset, nbytes: The range.
        block, base: The memory, and where in it the range begins, on a page.
        staging, staged: Memory for elements before a cast, and how much of it is taken.
        reads: What fills it.
        pieces: The ranges of tensors in it.
    """

    offset: int
    nbytes: int
    block: Any
    base: int
    staging: Any
    reads: Reads
    staged: int = 0
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def bytes(self) -> Any:
        """The window's memory, up to the end of its last page."""
        block = self.block if isinstance(self.block, np.ndarray) else self.block.numpy()
        return block[self.base : self.base + -(-self.nbytes // PAGE) * PAGE]

    def stage(self, ref: ArrayRef) -> Any:
        """An array in the memory for elements before a cast."""
        begin = -(-self.staged // ALIGNMENT) * ALIGNMENT
        self.staged = begin + memory.nbytes_of(ref)
        return memory.view(self.staging, ref, begin)


class _Reading:
    """The reads that may be under way, to be stopped at the end. Older ones are forgotten, with what they were for."""

    def __init__(self) -> None:
        self.latest: deque[Reads] = deque(maxlen=2)

    def close(self) -> None:
        for reads in self.latest:
            reads.close()


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
        """Take the tensors.

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

    def copy(self, path: Path, file: File) -> None:
        """Write one file, and sync it.

        Args:
            path: The new file.
            file: Its layout.

        Raises:
            CorruptError: Bytes do not match a checksum, or a tensor does not match its digest; the message names it.
            FormatError: A file of the checkpoint is damaged.
            StorageError: A system call failed.
        """
        size, staging = self._sizes(file)
        rooms = [(memory.allocate("torch", size + PAGE), memory.allocate("torch", staging)) for _ in range(BUFFERS)]
        written: list[Future[None]] = []
        crcs: dict[str, int] = {}
        with (
            _opened(path, direct=self._direct_io) as fd,
            ThreadPoolExecutor(1, "datastates-export") as writer,
            contextlib.closing(_Reading()) as reading,
        ):

            def begin(number: int) -> _Window:
                if number >= BUFFERS:
                    written[number - BUFFERS].result()
                window = self._window(file, number * size, size, *rooms[number % BUFFERS])
                reading.latest.append(window.reads)
                window.reads.start(self._executor)
                return window

            count = -(-file.nbytes // size)
            upcoming = begin(0)
            for number in range(count):
                window = upcoming
                if number + 1 < count:
                    upcoming = begin(number + 1)
                window.reads.finish()
                self._check(window, crcs)
                written.append(writer.submit(self._write, fd, path, window))
            for done in written:
                done.result()
            with files.syscall("truncate", path):
                os.ftruncate(fd, file.nbytes)
            with files.syscall("sync", path):
                os.fsync(fd)

    def _sizes(self, file: File) -> tuple[int, int]:
        """Bytes of a window, a power of two, and of memory for a cast: all windows together stay within MOST_MEMORY."""
        cast = [(t, self._stored_type(t)) for _, t in file.tensors if t.dtype != self._stored_type(t)]
        ratio = max((BY_NAME[stored].itemsize / BY_NAME[t.dtype].itemsize for t, stored in cast), default=0.0)
        most = MOST_MEMORY / BUFFERS / (1 + ratio)
        size = min(1 << math.floor(math.log2(most)), -(-file.nbytes // PAGE) * PAGE)
        return size, int(size * ratio) + ALIGNMENT * len(cast)

    def _stored_type(self, tensor: Tensor) -> str:
        return self._origins[tensor.key].row.dtype.name

    def _window(self, file: File, offset: int, size: int, block: Any, staging: Any) -> _Window:
        """Lay a window out, and queue its reads."""
        nbytes = min(size, file.nbytes - offset)
        base = -arrays.address(block) % PAGE
        window = _Window(offset, nbytes, block, base, staging, Reads(in_full=True))
        if offset < len(file.header):
            part = file.header[offset : offset + nbytes]
            window.bytes[: len(part)] = np.frombuffer(part, np.uint8)
        first = max(0, bisect_right(file.tensors, offset, key=lambda one: one[0]) - 1)
        for at, tensor in islice(file.tensors, first, None):
            if at >= offset + nbytes:
                break
            itemsize = BY_NAME[tensor.dtype].itemsize
            begin, end = max(at, offset), min(at + tensor.nbytes, offset + nbytes)
            if begin < end:
                self._queue(window, tensor, (begin - at) // itemsize, (end - at) // itemsize, base + begin - offset)
        return window

    def _queue(self, window: _Window, tensor: Tensor, begin: int, end: int, at: int) -> None:
        """Queue the reads of a range of a tensor's elements, to byte ``at`` of the window's block."""
        origin, stored = self._origins[tensor.key], self._stored_type(tensor)
        whole = end - begin == math.prod(tensor.shape)
        shape = tensor.shape if whole else (end - begin,)
        stride = strides.row_major(shape)
        place = memory.view(window.block, ArrayRef(tensor.key, "torch", tensor.dtype, shape, stride), at)
        is_cast = stored != tensor.dtype
        array = window.stage(ArrayRef(tensor.key, "torch", stored, shape, stride)) if is_cast else place
        live = arrays.destination(tensor.key, array)
        if not whole:
            live = replace(live, global_shape=tensor.shape, offset=None, flat=(begin, end))
        for source, row in origin.sources:
            window.reads.add(source, row, live)
        window.pieces.append(_Piece(tensor, begin, end, array, place if is_cast else None))

    def _check(self, window: _Window, crcs: dict[str, int]) -> None:
        """Compare the digests of the tensors that end in a window, and cast what is to be cast."""
        for piece in window.pieces:
            key, origin = piece.tensor.key, self._origins[piece.tensor.key]
            crcs[key] = checksums.crc32(_as_bytes(piece.read), crcs.get(key, 0))
            if piece.end == math.prod(piece.tensor.shape):
                found = crcs.pop(key)
                if origin.digest is not None and found != origin.digest:
                    path = str(origin.sources[0][0].path)
                    raise CorruptError(f"{key!r} from {path} does not match its digest", key=key, path=path)
            if piece.cast is not None:
                memory.convert(piece.cast, piece.read)

    def _write(self, fd: int, path: Path, window: _Window) -> None:
        data, at = window.bytes, 0
        while at < len(data):
            with files.syscall("write", path):
                count = os.pwrite(fd, data[at:], window.offset + at)
            if not count:
                raise StorageError(errno.ENOSPC, "write", str(path))
            at += count
        self._progress(window.nbytes)


def _as_bytes(array: Any) -> Any:
    """The bytes of a contiguous array, without a copy."""
    if arrays.kind_of(array) == "torch":
        import torch

        return array.reshape(-1).view(torch.uint8).numpy()
    return array.reshape(-1).view(np.uint8)


@contextlib.contextmanager
def _opened(path: Path, *, direct: bool) -> Iterator[int]:
    """Open a new file for writing, past the page cache if asked and if the file system can."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    with files.syscall("open", path):
        fd = os.open(path, flags | os.O_EXCL, 0o644)
    try:
        if direct:
            with contextlib.suppress(OSError):
                past = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
                os.close(fd)
                fd = past
        yield fd
    finally:
        os.close(fd)
