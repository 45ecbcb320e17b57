"""Loads whole checkpoints without providers: nested arrays and objects, assembled from the parts of all ranks."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datastates._base import gc_pause
from datastates._base.files import read_bytes
from datastates.container import checksums, pickle_reader
from datastates.container.file import Container
from datastates.container.logical import combine
from datastates.container.rows import DataPlace, logical, place_of, reference
from datastates.errors import FormatError
from datastates.executor.executor import Executor
from datastates.restoring.provider_view import Trust, naming, place_in_pickle
from datastates.restoring.reads import Reads
from datastates.restoring.stored import open_all
from datastates.state import arrays, memory
from datastates.state.shards import StoredArray

READ_AT_ONCE = 1 << 30
"""Bytes of records to allocate before their reads begin: memory of a device takes time to allocate."""


@gc_pause.paused()
def load(
    path: Path,
    executor: Callable[[int], Executor],
    *,
    trust: Trust,
    device: Any = None,
    place: Callable[[Any], Any] = lambda block: block,
) -> dict[str, Any]:
    """Read a checkpoint directory, or one container file, as nested arrays and objects.

    Args:
        path: A checkpoint directory, a directory of them (the newest is read), or one container file.
        executor: Makes an executor for reading so many bytes.
        trust: As for :func:`datastates.load`.
        device: The CUDA device for arrays of torch; None for host memory.
        place: Given the byte array that a record with torch tensors is about to be read into, returns the array to use
            instead. It is used only if there is a single container.

    Raises:
        DatastatesError: As for :func:`datastates.load`.
    """
    sources = open_all(path)
    pickles = [(source, _read_pickle(source)) for source in sources]
    blocks = _Records(sources[0], device, place) if len(sources) == 1 else _Tensors(sources, device)
    with contextlib.closing(blocks):
        blocks.start(executor)
        # an untrusted or damaged object stops the reads
        surveyed = [_survey(source, data, blocks, trust) for source, data in pickles]
        blocks.finish()
    values = []
    for (source, data), (value, complete) in zip(pickles, surveyed, strict=True):
        with naming(str(source.path)):
            values.append(value if complete else pickle_reader.loads(data, blocks.of(source), trust=trust))
    result: dict[str, Any] = values[0]
    for value in values[1:]:
        result = _merged(result, value)
    return result


def _survey(source: Container, data: bytes, blocks: _Records | _Tensors, trust: Trust) -> tuple[Any, bool]:
    with naming(str(source.path)):
        value, complete = pickle_reader.survey(data, blocks.of(source), trust=trust)
        if not isinstance(value, dict):
            raise FormatError(f"data.pkl holds a {type(value).__name__}, not a mapping of providers")
        return value, complete


def _merged(first: Any, second: Any) -> Any:
    """Merge the values of two ranks: the keys of both. For a key that both have, the value of the lower rank."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key, value in second.items():
            first[key] = _merged(first[key], value) if key in first else value
    elif type(first) is type(second) is list and len(first) == len(second):
        first[:] = [_merged(a, b) for a, b in zip(first, second, strict=True)]
    return first


class _Blocks(ABC):
    """New memory for all arrays, and the reads that fill it."""

    def __init__(self) -> None:
        self._reads: list[Reads] = []

    @abstractmethod
    def start(self, executor: Callable[[int], Executor]) -> None:
        """Begin to read and verify all of it."""

    @abstractmethod
    def of(self, source: Container) -> Callable[[StoredArray], object]:
        """A function that returns the array for a reference in a container's objects."""

    def finish(self) -> None:
        """Wait until everything is read."""
        for reads in self._reads:
            reads.finish()

    def close(self) -> None:
        """Stop what is still being read."""
        for reads in self._reads:
            reads.close()


class _Tensors(_Blocks):
    """Every logical tensor in new memory, to be filled from the parts of all containers."""

    def __init__(self, sources: Sequence[Container], device: Any) -> None:
        super().__init__()
        self._reads = [Reads(in_full=True)]
        self._arrays: dict[str, Any] = {}
        self._keys: dict[int, dict[DataPlace, str]] = {id(source): {} for source in sources}
        tensors = combine([source.index.shards for source in sources])
        if device is not None:
            wholes = (logical(tensor.parts[0][2]) for tensor in tensors.values())
            memory.reserve(sum(memory.nbytes_of(ref) for ref in wholes if ref.kind == "torch"), device)
        for key, tensor in tensors.items():
            if not tensor.is_complete:
                raise FormatError(f"{key!r} is not whole: the containers do not hold all of its elements")
            self._arrays[key] = memory.empty(logical(tensor.parts[0][2]), device)
            live = arrays.array_shard(key, self._arrays[key])
            for number, _, row in tensor.parts:
                self._keys[id(sources[number])][place_of(row)] = key
                if row.part.numel:
                    self._reads[0].add(sources[number], row, live)

    def of(self, source: Container) -> Callable[[StoredArray], object]:
        """A function that returns the array for a reference in a container's objects."""
        keys = self._keys[id(source)]

        def array(stored: StoredArray) -> object:
            key = keys.get(place_in_pickle(stored))
            if key is None:
                raise FormatError(f"an array of record {stored.record!r} that the index does not list")
            return memory.with_grad(self._arrays[key], stored.requires_grad)

        return array

    def start(self, executor: Callable[[int], Executor]) -> None:
        """Begin to read and verify all tensors."""
        self._reads[0].start(executor(self._reads[0].nbytes))


class _Records(_Blocks):
    """Every record of one container in new memory, and the arrays that are views of it."""

    def __init__(self, source: Container, device: Any, place: Callable[[Any], Any]) -> None:
        super().__init__()
        self._source = source
        self._device = device
        self._place = place
        table = source.index.shards
        self._rows = {place_of(row): row for row in map(table.row, range(len(table)))}
        self._kinds = {row.record: row.kind for row in self._rows.values() if row.kind != "torch"}
        # a block from torch can be viewed as arrays of both kinds, so torch wins where both lie in a record
        self._kinds |= {row.record: row.kind for row in self._rows.values() if row.kind == "torch"}
        self._blocks: list[Any] = []
        self._made: dict[DataPlace, Any] = {}

    def array(self, stored: StoredArray) -> object:
        """The array for a reference in an object. Tied arrays are the same object."""
        place = place_in_pickle(stored)
        if place not in self._made:
            if place not in self._rows:
                raise FormatError(f"an array of record {stored.record!r} that the index does not list")
            row = self._rows[place]
            self._made[place] = memory.view(self._blocks[row.record], reference(row), row.offset)
        return memory.with_grad(self._made[place], stored.requires_grad)

    def of(self, source: Container) -> Callable[[StoredArray], object]:
        """A function that returns the array for a reference in the container's objects."""
        del source
        return self.array

    def start(self, executor: Callable[[int], Executor]) -> None:
        """Allocate all records, and begin to read and verify them meanwhile."""
        index = self._source.index
        sizes, offsets = index.record_nbytes.tolist(), index.data_offset.tolist()
        made, begin = executor(sum(sizes)), 0
        if self._device is not None:
            memory.reserve(sum(n for r, n in enumerate(sizes) if self._kinds.get(r) == "torch"), self._device)
        while begin < len(sizes):
            reads, nbytes = Reads(), 0
            self._reads.append(reads)
            while begin < len(sizes) and nbytes < READ_AT_ONCE:
                block = self._allocate(self._kinds.get(begin, "numpy"), sizes[begin])
                self._blocks.append(block)
                reads.add_memory(self._source, offsets[begin], arrays.memory(block))
                nbytes += sizes[begin]
                begin += 1
            reads.start(made)

    def _allocate(self, kind: str, nbytes: int) -> Any:
        block = memory.allocate(kind, nbytes, self._device)
        return self._place(block) if kind == "torch" else block


def _read_pickle(source: Container) -> bytes:
    """Read and verify all of ``data.pkl``; raises CorruptError, which names the damaged object where it is one."""
    index = source.index
    data = read_bytes(source.path)(index.pickle_offset, index.pickle_nbytes)
    if checksums.crc32(data) != index.pickle_crc:
        for stored in index.objects:
            source.read_object(stored)
        raise source.corrupt("data.pkl")
    return data
