"""Loads whole checkpoints without providers: nested arrays and objects, assembled from the parts of all ranks.

It reads the rows and records of containers, not :class:`~datastates.reading.tensors.Tensors`. Objects refer to places
in their containers, 20,000 small tensors take 0.7 s in place of 0.9, and the catalog may be lost.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

from datastates._base import gc_pause
from datastates.container import checksums, pickle_reader, pickle_writer
from datastates.container.file import Container
from datastates.container.logical import Logical, combine
from datastates.container.pickle_native import read_plain
from datastates.container.pickle_reader import Trust
from datastates.container.rows import DataPlace, StoredRows, place_in_pickle, place_of, reference
from datastates.container.table import KINDS, WHOLE, Row
from datastates.errors import FormatError, naming
from datastates.executor.executor import Executor
from datastates.reading.fill import as_referred, fill
from datastates.reading.new_arrays import NewArrays
from datastates.reading.new_tensors import FoundTensor, reserve
from datastates.reading.stored import Stored
from datastates.state import memory
from datastates.state.new_memory import AS_SAVED, Into
from datastates.state.parts import Part, uncovered
from datastates.state.shards import ArrayRef, StoredArray, full_key
from datastates.storage import store_of

READ_AT_ONCE = 1 << 30
"""Bytes of records to allocate before their reads begin. Reads then run while more memory is allocated."""


@gc_pause.paused()
def load(
    stored: Stored,
    sources: Sequence[Container],
    executor: Callable[[int], Executor],
    *,
    trust: Trust,
    into: Into = AS_SAVED,
    place: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Read a checkpoint, or one container file, as nested arrays and objects.

    Args:
        stored: The checkpoint or the file.
        sources: All its containers, opened.
        executor: Makes an executor for reading a number of bytes.
        trust: As for :func:`datastates.load`.
        into: Library and device of the new arrays.
        place: Given the byte array that a record with torch tensors is about to be read into, returns the array to use
            instead. It is used only if there is a single container, in which each tensor is one part. None uses the
            byte array itself.

    Raises:
        DatastatesError: As for :func:`datastates.load`.
    """
    pickle_reader.check_trust(trust)
    pieces = [piece for source in sources for piece in _pieces(source, _read_pickle(source))]
    has_parts = _has_parts(stored, sources[0])
    arrays = _WholeTensors(stored, sources, into) if has_parts else _Records(sources[0], into, place)
    with contextlib.closing(arrays.new):
        arrays.start(executor)
        # an untrusted or damaged object stops the reads
        for piece in pieces:
            with naming(str(piece.source.path)):
                piece.survey(arrays, trust, into)
        arrays.new.finish()
    built = []
    for piece in pieces:
        with naming(str(piece.source.path)):
            built.append(piece.built(arrays, trust, into))
    return reduce(_merged, built) if built else {}


def _has_parts(stored: Stored, first: Container) -> bool:
    """Whether tensors must be put together from parts. A part in a single file is read as a tensor of its own."""
    table, path = first.index.shards, stored.path
    return (
        not stored.is_one_file
        or bool(table.by_key.repeated)
        or (not store_of(path).is_file(path) and bool((table.part != WHOLE).any()))
    )


@dataclass(slots=True, eq=False)
class _Piece:
    """A part of ``data.pkl`` that is read by itself.

    Attributes:
        source: The container.
        provider: Name of the provider whose only object the piece is; None if it holds several providers.
        whole: Whether the piece is all of ``data.pkl``.
        opcodes: The pickle opcodes that push the piece's value.
        value: The value of the piece.
        complete: Whether the value needs no more building once all arrays are read.
    """

    source: Container
    provider: str | None
    whole: bool
    opcodes: bytes
    value: Any = None
    complete: bool = False

    def survey(self, arrays: _Arrays, trust: Trust, into: Into) -> None:
        """Read the value before its arrays, natively if it is plain; raises as :func:`load` does."""
        if (name := self.provider) is not None:
            self.complete = self._read_natively(name, arrays)
        if not self.complete:
            stream = pickle_writer.stream(self.opcodes)
            resolve = arrays.of(self.source)
            self.value, self.complete = pickle_reader.survey(stream, resolve, trust=trust, with_torch=into.with_torch)
        if self.whole and not isinstance(self.value, dict):
            raise FormatError(f"data.pkl holds a {type(self.value).__name__}, not a mapping of providers")

    def _read_natively(self, name: str, arrays: _Arrays) -> bool:
        plain = read_plain(self.opcodes, StoredRows(self.source.index, name), logical=False)
        if plain is None:
            return False
        (self.value,) = plain
        try:
            return fill(self.value, lambda ref: arrays.referred(self.source, full_key(name, ref.key), ref))
        except (FormatError, ImportError):
            raise
        except Exception as error:  # for example a parameter of integers with the flag that it requires a gradient
            raise FormatError(f"objects cannot be decoded: {type(error).__name__}: {error}") from error

    def built(self, arrays: _Arrays, trust: Trust, into: Into) -> dict[str, Any]:
        """Build the value, now that all arrays are read; returns the providers' values by name."""
        value = self.value
        if not self.complete:
            stream = pickle_writer.stream(self.opcodes)
            value = pickle_reader.loads(stream, arrays.of(self.source), trust=trust, with_torch=into.with_torch)
        return value if self.whole or self.provider is None else {self.provider: value}


def _pieces(source: Container, data: bytes) -> Iterator[_Piece]:
    """Cut ``data.pkl`` into pieces: one for each provider, if each provider has one object that holds everything.

    Otherwise the whole of ``data.pkl`` is one piece.
    """
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
    """Merge two ranks' values: the result has the keys of both, and the leaf of ``first`` where both have one."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key, value in second.items():
            first[key] = _merged(first[key], value) if key in first else value
    elif type(first) is type(second) is list and len(first) == len(second):
        first[:] = [_merged(a, b) for a, b in zip(first, second, strict=True)]
    return first


def _is_tied(a: Row, of_a: Logical, b: Row, of_b: Logical) -> bool:
    """Whether two rows at the same place are the same part of two tensors whose digests say that they are equal."""
    return a.part == b.part and of_a.stored_digest == of_b.stored_digest


class _Arrays(ABC):
    """New memory for all arrays of a checkpoint. The objects of containers refer to these arrays.

    Attributes:
        new: The arrays, and the reads that fill them.
    """

    new: NewArrays

    def start(self, executor: Callable[[int], Executor]) -> None:
        """Begin to read and verify all arrays."""
        self.new.start(executor(self.new.nbytes))

    @abstractmethod
    def referred(self, source: Container, full: str, ref: ArrayRef) -> object:
        """The array with the full key ``full``, as a parameter or with a gradient if ``ref`` says so.

        Tied arrays are the same object.
        """

    @abstractmethod
    def at(self, source: Container, place: DataPlace) -> Any:
        """The array at a place in a container; None if the index lists no array there."""

    def of(self, source: Container) -> Callable[[StoredArray], object]:
        """A function that returns the array for a reference in the objects of a container."""

        def array(stored: StoredArray) -> object:
            found = self.at(source, place_in_pickle(stored))
            if found is None:
                raise FormatError(f"an array of record {stored.record!r} that the index does not list")
            return memory.with_grad(found, stored.requires_grad)

        return array


class _WholeTensors(_Arrays):
    """Every logical tensor in new memory, to be filled from the parts of all containers."""

    def __init__(self, stored: Stored, sources: Sequence[Container], into: Into) -> None:
        self.new = NewArrays(into)
        self._arrays: dict[tuple[int, DataPlace], Any] = {}  # by container and place
        self._places: dict[tuple[int, str], DataPlace] = {}  # by container and key
        rows: dict[tuple[int, DataPlace], Row] = {}
        tensors = combine([source.index.shards for source in sources])
        found = {key: _found(stored, key, tensor, sources) for key, tensor in tensors.items()}
        reserve(found.values(), into)
        for key, tensor in tensors.items():
            array = self.new.whole(found[key])
            for number, _, row in tensor.parts:
                source = sources[number]
                place = self._places[id(source), key] = place_of(row)
                other = rows.setdefault((id(source), place), row)
                # objects refer to a place: with two tensors at one place they would get the wrong tensor
                if other.key != key and not _is_tied(other, tensors[other.key], row, tensor):
                    both = f"{other.key!r} and {key!r}"
                    raise FormatError(f"{both} share memory in {source.path}, but are different tensors")
                self._arrays[id(source), place] = array

    def referred(self, source: Container, full: str, ref: ArrayRef) -> object:
        return as_referred(self._arrays[id(source), self._places[id(source), full]], ref)

    def at(self, source: Container, place: DataPlace) -> Any:
        return self._arrays.get((id(source), place))


def _found(stored: Stored, key: str, tensor: Logical, sources: Sequence[Container]) -> FoundTensor:
    """The parts of a tensor, each with its file; raises FormatError if parts overlap or are missing."""
    if not tensor.is_complete:
        raise FormatError(f"{key!r} is not whole: the containers do not hold all of its elements")
    # the parts have as many elements as the tensor; if one is missing, another is there twice
    if len(tensor.parts) > 1 and uncovered(Part.whole(tensor.shape), [row.part for _, _, row in tensor.parts]):
        raise FormatError(f"{key!r} has parts that overlap")
    return tensor.parts[0][2], [stored.at(sources[number], row) for number, _, row in tensor.parts if row.part.numel]


class _Records(_Arrays):
    """Every record of one container in new memory, and the arrays that are views of it."""

    def __init__(self, source: Container, into: Into, place: Callable[[Any], Any] | None) -> None:
        self._source = source
        self._into = into
        self.new = NewArrays(into, place)
        self._table = table = source.index.shards
        self._numbers = dict(zip(table.by_key, range(len(table)), strict=True))
        self._record, self._offset = table.record.tolist(), table.offset.tolist()
        # torch memory can be viewed as arrays of both libraries: torch, the last in order, wins a record with both
        kinds = (into.kind(KINDS[kind]) for kind in table.kind.tolist())
        self._kinds = dict(sorted(zip(self._record, kinds, strict=True)))

    def referred(self, source: Container, full: str, ref: ArrayRef) -> object:
        return as_referred(self._array(source, self._numbers[full], replace(ref, key=full)), ref)

    def at(self, source: Container, place: DataPlace) -> Any:
        number = self._by_place.get(place)
        return None if number is None else self._array(source, number, reference(self._table.row(number)))

    @cached_property
    def _by_place(self) -> dict[DataPlace, int]:
        return {place_of(row): number for number, row in enumerate(self._table.rows(range(len(self._table))))}

    def _array(self, source: Container, number: int, ref: ArrayRef) -> Any:
        """The array of row number ``number``. Tied arrays are the same object."""
        return self.new.view(source, self._record[number], ref, self._offset[number])

    def start(self, executor: Callable[[int], Executor]) -> None:
        """Allocate memory for all records, and meanwhile begin to read and verify them."""
        sizes = self._source.index.records.nbytes.tolist()
        made = executor(sum(sizes))
        if self._into.device is not None:
            memory.reserve(sum(n for r, n in enumerate(sizes) if self._kinds.get(r) == "torch"), self._into.device)
        waiting = 0  # summed here, as `NewArrays.nbytes` sorts all queued reads
        for record, nbytes in enumerate(sizes):
            self.new.record(self._source, record, self._kinds.get(record, "numpy"))
            waiting += nbytes
            if waiting >= READ_AT_ONCE:
                self.new.start(made)
                waiting = 0
        self.new.start(made)


def _read_pickle(source: Container) -> bytes:
    """Read and verify all of ``data.pkl``; raises CorruptError, which names the damaged object if one is damaged."""
    index = source.index
    data = store_of(source.path).read(source.path, index.pickle_offset, index.pickle_nbytes)
    if checksums.crc32(data) != index.pickle_crc:
        for stored in index.objects:
            source.read_object(stored)
        raise source.corrupt("data.pkl")
    return data
