"""Loads whole checkpoints without providers: nested arrays and objects, assembled from the parts of all ranks."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

from datastates._base import gc_pause
from datastates._base.files import read_bytes
from datastates.container import checksums, pickle_reader, pickle_writer
from datastates.container.file import Container
from datastates.container.logical import Logical, combine
from datastates.container.pickle_native import read_plain
from datastates.container.pickle_reader import Trust
from datastates.container.rows import DataPlace, StoredRows, logical, place_of, reference
from datastates.container.table import KINDS, WHOLE, Row
from datastates.errors import FormatError
from datastates.executor.executor import Executor
from datastates.restoring.every_container import open_all
from datastates.restoring.fill import as_referred, fill
from datastates.restoring.provider_view import naming, place_in_pickle
from datastates.restoring.reads import Reads
from datastates.state import arrays, memory
from datastates.state.into import AS_SAVED, Into
from datastates.state.parts import Part, uncovered
from datastates.state.shards import ArrayRef, StoredArray, full_key

READ_AT_ONCE = 1 << 30
"""Bytes of records to allocate before their reads begin: memory of a device takes time to allocate."""


@gc_pause.paused()
def load(
    path: Path,
    executor: Callable[[int], Executor],
    *,
    trust: Trust,
    into: Into = AS_SAVED,
    place: Callable[[Any], Any] = lambda block: block,
) -> dict[str, Any]:
    """Read a checkpoint directory, or one container file, as nested arrays and objects.

    Args:
        path: A checkpoint directory, a directory of them (the newest is read), or one container file.
        executor: Makes an executor for reading so many bytes.
        trust: As for :func:`datastates.load`.
        into: Whose arrays to read into.
        place: Given the byte array that a record with torch tensors is about to be read into, returns the array to use
            instead. It is used only if there is a single container, in which each tensor is one part.

    Raises:
        DatastatesError: As for :func:`datastates.load`.
    """
    pickle_reader.check_trust(trust)
    sources = open_all(path)
    pieces = [piece for source in sources for piece in _pieces(source, _read_pickle(source))]
    blocks = _Tensors(sources, into) if _has_parts(path, sources) else _Records(sources[0], into, place)
    with contextlib.closing(blocks):
        blocks.start(executor)
        # an untrusted or damaged object stops the reads
        for piece in pieces:
            with naming(str(piece.source.path)):
                piece.survey(blocks, trust, into)
        blocks.finish()
    built = []
    for piece in pieces:
        with naming(str(piece.source.path)):
            built.append(piece.built(blocks, trust, into))
    return reduce(_merged, built) if built else {}


def _has_parts(path: Path, sources: Sequence[Container]) -> bool:
    """Whether tensors are put together from parts. In one rank's file, a part is a tensor of the part's shape."""
    table = sources[0].index.shards
    return len(sources) > 1 or bool(table.by_key.repeated) or (not path.is_file() and bool((table.part != WHOLE).any()))


@dataclass(slots=True, eq=False)
class _Piece:
    """A part of ``data.pkl`` that is read by itself.

    Attributes:
        source: The container.
        provider: The provider whose only object it is; None if it is of several providers.
        whole: Whether it is all of ``data.pkl``.
        opcodes: The opcodes that push it.
        value: What it holds.
        complete: Whether nothing of the value has to be built once all arrays are read.
    """

    source: Container
    provider: str | None
    whole: bool
    opcodes: bytes
    value: Any = None
    complete: bool = False

    def survey(self, blocks: _Blocks, trust: Trust, into: Into) -> None:
        """Read it before its arrays, natively if it is plain; raises as :func:`load` does."""
        if (name := self.provider) is not None:
            self.complete = self._read_natively(name, blocks)
        if not self.complete:
            stream = pickle_writer.stream(self.opcodes)
            resolve = blocks.of(self.source)
            self.value, self.complete = pickle_reader.survey(stream, resolve, trust=trust, with_torch=into.with_torch)
        if self.whole and not isinstance(self.value, dict):
            raise FormatError(f"data.pkl holds a {type(self.value).__name__}, not a mapping of providers")

    def _read_natively(self, name: str, blocks: _Blocks) -> bool:
        plain = read_plain(self.opcodes, StoredRows(self.source.index, name))
        if plain is None:
            return False
        (self.value,) = plain
        try:
            return fill(self.value, lambda ref: blocks.referred(self.source, full_key(name, ref.key), ref))
        except (FormatError, ImportError):
            raise
        except Exception as error:  # for example a parameter of integers that is said to require a gradient
            raise FormatError(f"objects cannot be decoded: {type(error).__name__}: {error}") from error

    def built(self, blocks: _Blocks, trust: Trust, into: Into) -> dict[str, Any]:
        """The values by provider, now that all arrays are read."""
        value = self.value
        if not self.complete:
            stream = pickle_writer.stream(self.opcodes)
            value = pickle_reader.loads(stream, blocks.of(self.source), trust=trust, with_torch=into.with_torch)
        return value if self.whole or self.provider is None else {self.provider: value}


def _pieces(source: Container, data: bytes) -> Iterator[_Piece]:
    """The providers of a container, each by itself if all of them have one object that holds everything."""
    index, body = source.index, pickle_writer.body(data)
    names = [index.shards.providers[stored.provider] for stored in index.objects if stored.key == ""]
    if len(index.objects) != len(names) or sorted(names) != sorted(index.shards.providers):
        yield _Piece(source, None, True, body)
        return
    for name, stored in sorted(zip(names, index.objects, strict=True), key=lambda pair: pair[1].offset):
        begin = stored.offset - index.pickle_offset
        opcodes = data[begin : begin + stored.nbytes]
        yield _Piece(source, name, opcodes == body, opcodes)


def _merged(first: Any, second: Any) -> Any:
    """Merge the values of two ranks: the keys of both. For a key that both have, the value of the lower rank."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key, value in second.items():
            first[key] = _merged(first[key], value) if key in first else value
    elif type(first) is type(second) is list and len(first) == len(second):
        first[:] = [_merged(a, b) for a, b in zip(first, second, strict=True)]
    return first


def _is_tied(a: Row, of_a: Logical, b: Row, of_b: Logical) -> bool:
    """Whether two parts that share memory are the same part of tensors with the same elements."""
    return a.part == b.part and of_a.stored_digest == of_b.stored_digest


class _Blocks(ABC):
    """New memory for all arrays, and the reads that fill it."""

    def __init__(self) -> None:
        self._reads: list[Reads] = []

    @abstractmethod
    def start(self, executor: Callable[[int], Executor]) -> None:
        """Begin to read and verify all of it."""

    @abstractmethod
    def referred(self, source: Container, full: str, ref: ArrayRef) -> object:
        """The array of a container's full key, as a reference has it. Tied arrays are the same object."""

    @abstractmethod
    def at(self, source: Container, place: DataPlace) -> Any:
        """The array at a place in a container; None if the index lists none there."""

    def of(self, source: Container) -> Callable[[StoredArray], object]:
        """A function that returns the array for a place in a container's objects."""

        def array(stored: StoredArray) -> object:
            found = self.at(source, place_in_pickle(stored))
            if found is None:
                raise FormatError(f"an array of record {stored.record!r} that the index does not list")
            return memory.with_grad(found, stored.requires_grad)

        return array

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

    def __init__(self, sources: Sequence[Container], into: Into) -> None:
        super().__init__()
        self._reads = [Reads(in_full=True)]
        self._arrays: dict[tuple[int, DataPlace], Any] = {}  # by container and place
        self._places: dict[tuple[int, str], DataPlace] = {}  # by container and key
        rows: dict[tuple[int, DataPlace], Row] = {}
        tensors = combine([source.index.shards for source in sources])
        if into.device is not None:
            wholes = (logical(tensor.parts[0][2]) for tensor in tensors.values())
            on_device = (memory.nbytes_of(ref) for ref in wholes if into.kind(ref.kind) == "torch")
            memory.reserve(sum(on_device), into.device)
        for key, tensor in tensors.items():
            if not tensor.is_complete:
                raise FormatError(f"{key!r} is not whole: the containers do not hold all of its elements")
            # as many elements as the tensor has, but not all of them: some are there twice
            if len(tensor.parts) > 1 and uncovered(Part.whole(tensor.shape), [row.part for _, _, row in tensor.parts]):
                raise FormatError(f"{key!r} has parts that overlap")
            live = arrays.array_shard(key, into.empty(logical(tensor.parts[0][2])))
            for number, _, row in tensor.parts:
                source = sources[number]
                place = self._places[id(source), key] = place_of(row)
                other = rows.setdefault((id(source), place), row)
                # objects refer to a place, so they would get the wrong one of two tensors
                if other.key != key and not _is_tied(other, tensors[other.key], row, tensor):
                    both = f"{other.key!r} and {key!r}"
                    raise FormatError(f"{both} share memory in {source.path}, but are different tensors")
                self._arrays[id(source), place] = live.source
                if row.part.numel:
                    self._reads[0].add(source, row, live)

    def referred(self, source: Container, full: str, ref: ArrayRef) -> object:
        return as_referred(self._arrays[id(source), self._places[id(source), full]], ref)

    def at(self, source: Container, place: DataPlace) -> Any:
        return self._arrays.get((id(source), place))

    def start(self, executor: Callable[[int], Executor]) -> None:
        self._reads[0].start(executor(self._reads[0].nbytes))


class _Records(_Blocks):
    """Every record of one container in new memory, and the arrays that are views of it."""

    def __init__(self, source: Container, into: Into, place: Callable[[Any], Any]) -> None:
        super().__init__()
        self._source = source
        self._into = into
        self._place = place
        self._table = table = source.index.shards
        self._numbers = dict(zip(table.by_key, range(len(table)), strict=True))
        self._record, self._offset = table.record.tolist(), table.offset.tolist()
        # a block from torch can be viewed as arrays of both kinds, so torch, the last in order, wins a record of both
        kinds = (into.kind(KINDS[kind]) for kind in table.kind.tolist())
        self._kinds = dict(sorted(zip(self._record, kinds, strict=True)))
        self._blocks: list[Any] = []
        self._made: dict[tuple[object, ...], Any] = {}

    def referred(self, source: Container, full: str, ref: ArrayRef) -> object:
        del source
        return as_referred(self._array(self._numbers[full], replace(ref, key=full)), ref)

    def at(self, source: Container, place: DataPlace) -> Any:
        del source
        number = self._by_place.get(place)
        return None if number is None else self._array(number, reference(self._table.row(number)))

    @cached_property
    def _by_place(self) -> dict[DataPlace, int]:
        return {place_of(row): number for number, row in enumerate(self._table.rows(range(len(self._table))))}

    def _array(self, number: int, ref: ArrayRef) -> Any:
        """The array of a row; tied ones are the same object."""
        place = self._record[number], self._offset[number], ref.dtype, ref.shape, ref.stride
        if place not in self._made:
            self._made[place] = self._into.view(self._blocks[self._record[number]], ref, self._offset[number])
        return self._made[place]

    def start(self, executor: Callable[[int], Executor]) -> None:
        """Allocate all records, and begin to read and verify them meanwhile."""
        index = self._source.index
        sizes, offsets = index.records.nbytes.tolist(), index.records.data_offset.tolist()
        made, begin = executor(sum(sizes)), 0
        if self._into.device is not None:
            memory.reserve(sum(n for r, n in enumerate(sizes) if self._kinds.get(r) == "torch"), self._into.device)
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
        block = self._into.allocate(kind, nbytes)
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
