"""Loads whole checkpoints without providers: nested arrays and objects, assembled from the parts of all ranks.

It needs all containers, and so no catalog. Where bytes lie, :meth:`datastates.reading.stored.Stored.placed` tells.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from datastates._base import gc_pause
from datastates._base.cached import cached_property
from datastates._base.columns import I64
from datastates.container import checksums, pickle_reader, pickle_writer
from datastates.container.file import Container
from datastates.container.pickle_native import read_plain
from datastates.container.pickle_reader import Trust
from datastates.container.rows import DataPlace, StoredRows, place_in_pickle, place_of, same_places
from datastates.container.table import Row, ShardTable
from datastates.errors import FormatError, naming
from datastates.executor.executor import Executor
from datastates.reading.fill import as_referred, fill
from datastates.reading.new_arrays import AllTensors
from datastates.reading.stored import Stored
from datastates.state import memory
from datastates.state.new_memory import AS_SAVED, Into
from datastates.state.shards import ArrayRef, StoredArray, full_key


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
        place: As for :class:`~datastates.reading.new_arrays.NewArrays`.

    Raises:
        DatastatesError: As for :func:`datastates.load`.
    """
    pickle_reader.check_trust(trust)
    pickles = [_read_pickle(source) for source in sources]
    tables = [source.shards for source in sources]
    tensors = _numbered(tables)
    # a part in a single file is read as a tensor of its own
    apart = stored.head.is_file and not tables[0].parts
    held = [
        one
        for source, tensor in zip(sources, tensors, strict=True)
        for one in stored.placed(source, tensor, np.arange(len(tensor)))
    ]
    new = AllTensors(held, into, place, apart=apart)
    rows = [_Rows(source, tensor, new) for source, tensor in zip(sources, tensors, strict=True)]
    if not apart:
        if len(wrong := np.flatnonzero(new.found != new.wanted)):
            key = new.row(int(wrong[0])).key
            raise FormatError(f"{key!r} is not whole: the containers do not hold all of its elements")
        if any(own.tied for own in rows):
            _refuse_untied(rows, tables, tensors)
    # kept containers come last, and have nothing that the ranks' own do not refer to
    own = list(zip(sources, rows, pickles, strict=True))[: stored.head.ranks]
    pieces = [piece for parts in own for piece in _pieces(*parts)]
    with contextlib.closing(new):
        # the parts have as many elements as the tensor; if one is missing, another is there twice
        new.begin(executor, lambda key: FormatError(f"{key!r} has parts that overlap"))
        # an untrusted or damaged object stops the reads
        for piece in pieces:
            with naming(str(piece.source.path)):
                piece.survey(trust, into)
        new.finish()
    built = []
    for piece in pieces:
        with naming(str(piece.source.path)):
            built.append(piece.built(trust, into))
    return reduce(_merged, built) if built else {}


@dataclass(slots=True, eq=False)
class _Piece:
    """A part of ``data.pkl`` that is read by itself.

    Attributes:
        source: The container.
        rows: Its rows.
        provider: Name of the provider whose only object the piece is; None if it holds several providers.
        whole: Whether the piece is all of ``data.pkl``.
        opcodes: The pickle opcodes that push the piece's value.
        value: The value of the piece.
        complete: Whether the value needs no more building once all arrays are read.
    """

    source: Container
    rows: _Rows
    provider: str | None
    whole: bool
    opcodes: bytes
    value: Any = None
    complete: bool = False

    def survey(self, trust: Trust, into: Into) -> None:
        """Read the value before its arrays, natively if it is plain; raises as :func:`load` does."""
        if (name := self.provider) is not None:
            self.complete = self._read_natively(name)
        if not self.complete:
            stream = pickle_writer.stream(self.opcodes)
            found = pickle_reader.survey(stream, self.rows.resolve, trust=trust, with_torch=into.with_torch)
            self.value, self.complete = found
        if self.whole and not isinstance(self.value, dict):
            raise FormatError(f"data.pkl holds a {type(self.value).__name__}, not a mapping of providers")

    def _read_natively(self, name: str) -> bool:
        rows = StoredRows(self.source.index, name)
        plain = read_plain(self.opcodes, rows, logical=False)
        if plain is None:
            return False
        (self.value,) = plain

        def array(ref: ArrayRef) -> object:
            named = ArrayRef(full_key(name, ref.key), ref.kind, ref.dtype, ref.shape, ref.stride)
            return as_referred(self.rows.array(rows.number(ref.key), named), ref)

        try:
            return fill(self.value, array)
        except (FormatError, ImportError):
            raise
        except Exception as error:  # for example a parameter of integers with the flag that it requires a gradient
            raise FormatError(f"objects cannot be decoded: {type(error).__name__}: {error}") from error

    def built(self, trust: Trust, into: Into) -> dict[str, Any]:
        """Build the value, now that all arrays are read; returns the providers' values by name."""
        value = self.value
        if not self.complete:
            stream = pickle_writer.stream(self.opcodes)
            value = pickle_reader.loads(stream, self.rows.resolve, trust=trust, with_torch=into.with_torch)
        return value if self.whole or self.provider is None else {self.provider: value}


def _pieces(source: Container, rows: _Rows, data: bytes) -> Iterator[_Piece]:
    """Cut ``data.pkl`` into pieces: one for each provider, if each provider has one object that holds everything.

    Otherwise the whole of ``data.pkl`` is one piece.
    """
    index, body = source.index, pickle_writer.body(data)
    names = [index.shards.providers[stored.provider] for stored in index.objects if stored.key == ""]
    if len(index.objects) != len(names) or sorted(names) != sorted(index.shards.providers):
        yield _Piece(source, rows, None, True, body)
        return
    for name, stored in sorted(zip(names, index.objects, strict=True), key=lambda pair: pair[1].offset):
        begin = stored.offset - index.pickle_offset
        opcodes = data[begin : begin + stored.nbytes]
        yield _Piece(source, rows, name, opcodes == body, opcodes)


def _merged(first: Any, second: Any) -> Any:
    """Merge two ranks' values: the result has the keys of both, and the leaf of ``first`` where both have one."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key, value in second.items():
            first[key] = _merged(first[key], value) if key in first else value
    elif type(first) is type(second) is list and len(first) == len(second):
        first[:] = [_merged(a, b) for a, b in zip(first, second, strict=True)]
    return first


def _numbered(tables: Sequence[ShardTable]) -> list[I64]:
    """For each row of some tables, the number of its tensor among the tensors of all."""
    if len(tables) == 1 and not tables[0].parts:
        return [np.arange(len(tables[0]))]
    asked = dict.fromkeys([key for table in tables for key in table.by_key])
    found = [table.find(asked) for table in tables]
    return [tensor[np.argsort(row)] for tensor, row in found]


def _digests(tables: Sequence[ShardTable], tensors: Sequence[I64]) -> list[int]:
    """For each tensor, the contributions of all its rows to its digest; -1 if one is unknown."""
    tensor, known = np.concatenate(tensors), np.concatenate([table.digested for table in tables])
    digest = np.zeros(int(tensor.max()) + 1, np.int64)
    np.bitwise_xor.at(digest, tensor, np.concatenate([table.digest for table in tables]))
    digest[tensor[known == 0]] = -1
    return digest.tolist()


class _Rows:
    """The rows of one container, which its objects refer to, as arrays in new memory."""

    def __init__(self, source: Container, tensor: I64, new: AllTensors) -> None:
        """Take for each row the number of its tensor."""
        self._source, self._tensor, self._new, self.path = source, tensor.tolist(), new, source.path
        self.tied = same_places(source.shards, np.arange(len(tensor)))
        # objects refer to a place: of several tensors there, the last one is meant
        self._last = {n: max(group, key=self._tensor.__getitem__) for group in self.tied for n in group}

    def ties(self) -> Iterator[tuple[Row, Row, tuple[int, int]]]:
        """Pairs of rows of different tensors that are the same memory, with the numbers of their tensors."""
        for group in self.tied:
            first, *others = self._source.shards.rows(group)
            for number, row in zip(group[1:], others, strict=True):
                if (one := self._tensor[group[0]]) != (other := self._tensor[number]):
                    yield first, row, (one, other)

    def array(self, number: int, ref: ArrayRef | None = None) -> Any:
        """The tensor of a row, which ``ref`` describes if that is known. Tied tensors are the same object."""
        last = self._last.get(number, number)
        return self._new.array(self._tensor[last], None if ref is None else (self._source, last, ref))

    def resolve(self, stored: StoredArray) -> object:
        """The tensor for a reference in the container's objects."""
        number = self._by_place.get(place_in_pickle(stored))
        if number is None:
            raise FormatError(f"an array of record {stored.record!r} that the index does not list")
        return memory.with_grad(self.array(number), stored.requires_grad)

    @cached_property
    def _by_place(self) -> dict[DataPlace, int]:
        rows = self._source.shards.rows(range(len(self._tensor)))
        return {place_of(row): number for number, row in enumerate(rows)}


def _refuse_untied(rows: Sequence[_Rows], tables: Sequence[ShardTable], tensors: Sequence[I64]) -> None:
    """Raise FormatError if two tensors are the same memory in a container, but differ: objects would get a wrong one.

    They are one tensor if one row is all of it, if all their rows are tied, or if their digests are known and equal.
    """
    digest, count = _digests(tables, tensors), np.bincount(np.concatenate(tensors)).tolist()
    every = [(own, *tie) for own in rows for tie in own.ties()]
    together = Counter(pair for _, first, row, pair in every if row.part == first.part)
    for own, first, row, pair in every:
        one, other = pair
        are_one = row.is_whole or together[pair] == count[one] == count[other] or -1 < digest[one] == digest[other]
        if row.part != first.part or not are_one:
            both = f"{first.key!r} and {row.key!r}"
            raise FormatError(f"{both} share memory in {own.path}, but are different tensors")


def _read_pickle(source: Container) -> bytes:
    """Read and verify all of ``data.pkl``; raises CorruptError, which names the damaged object if one is damaged."""
    index = source.index
    data = source.read_pickle(index.pickle_offset, index.pickle_nbytes)
    if checksums.crc32(data) != index.pickle_crc:
        for stored in index.objects:
            source.read_object(stored)
        raise source.corrupt("data.pkl")
    return data
