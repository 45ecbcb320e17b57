"""Loads whole checkpoints without providers: nested host arrays and objects, assembled from the parts of all ranks."""

from __future__ import annotations

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


@gc_pause.paused()
def load(
    path: Path, executor: Callable[[int], Executor], *, trust: Trust, place: Callable[[Any], Any] = lambda block: block
) -> dict[str, Any]:
    """Read a checkpoint directory, or one container file, as nested host arrays and objects.

    Args:
        path: A checkpoint directory, a directory of them (the newest is read), or one container file.
        executor: Makes an executor for reading so many bytes.
        trust: As for :func:`datastates.load`.
        place: Given the byte array that a record with torch tensors is about to be read into, returns the array to use
            instead. It is used only if there is a single container.

    Raises:
        DatastatesError: As for :func:`datastates.load`.
    """
    sources = open_all(path)
    pickles = [(source, _read_pickle(source)) for source in sources]
    blocks: _Records | _Tensors = _Records(sources[0], place) if len(sources) == 1 else _Tensors(sources)

    # read the objects before the arrays, so that untrusted or damaged ones are refused early
    surveyed = [_survey(source, data, blocks, trust) for source, data in pickles]
    blocks.read(executor)
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


class _Tensors:
    """Every logical tensor in new host memory, to be filled from the parts of all containers."""

    def __init__(self, sources: Sequence[Container]) -> None:
        self._reads = Reads(in_full=True)
        self._arrays: dict[str, Any] = {}
        self._keys: dict[int, dict[DataPlace, str]] = {id(source): {} for source in sources}
        tensors = combine([source.index.shards for source in sources])
        for key, tensor in tensors.items():
            if not tensor.is_complete:
                raise FormatError(f"{key!r} is not whole: the containers do not hold all of its elements")
            self._arrays[key] = memory.empty(logical(tensor.parts[0][2]))
            live = arrays.array_shard(key, self._arrays[key])
            for number, _, row in tensor.parts:
                self._keys[id(sources[number])][place_of(row)] = key
                if row.part.numel:
                    self._reads.add(sources[number], row, live)

    def of(self, source: Container) -> Callable[[StoredArray], object]:
        """A function that returns the array for a reference in a container's objects."""
        keys = self._keys[id(source)]

        def array(stored: StoredArray) -> object:
            key = keys.get(place_in_pickle(stored))
            if key is None:
                raise FormatError(f"an array of record {stored.record!r} that the index does not list")
            return memory.with_grad(self._arrays[key], stored.requires_grad)

        return array

    def read(self, executor: Callable[[int], Executor]) -> None:
        """Read and verify all tensors."""
        self._reads.run(executor(self._reads.nbytes))


class _Records:
    """Every record of one container in new host memory, and the arrays that are views of it."""

    def __init__(self, source: Container, place: Callable[[Any], Any]) -> None:
        self._source = source
        table = source.index.shards
        self._rows = {place_of(row): row for row in map(table.row, range(len(table)))}
        kinds = {row.record: row.kind for row in self._rows.values() if row.kind != "torch"}
        # a block from torch can be viewed as arrays of both kinds, so torch wins where both lie in a record
        kinds |= {row.record: row.kind for row in self._rows.values() if row.kind == "torch"}
        sizes = source.index.record_nbytes.tolist()
        self._blocks = [memory.allocate(kinds.get(r, "numpy"), n) for r, n in enumerate(sizes)]
        self._blocks = [place(b) if kinds.get(r) == "torch" else b for r, b in enumerate(self._blocks)]
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

    def read(self, executor: Callable[[int], Executor]) -> None:
        """Read and verify all records."""
        reads = Reads()
        for block, offset in zip(self._blocks, self._source.index.data_offset.tolist(), strict=True):
            reads.add_memory(self._source, offset, arrays.memory(block))
        reads.run(executor(reads.nbytes))


def _read_pickle(source: Container) -> bytes:
    """Read and verify all of ``data.pkl``; raises CorruptError, which names the damaged object where it is one."""
    index = source.index
    data = read_bytes(source.path)(index.pickle_offset, index.pickle_nbytes)
    if checksums.crc32(data) != index.pickle_crc:
        for stored in index.objects:
            source.read_object(stored)
        raise source.corrupt("data.pkl")
    return data
