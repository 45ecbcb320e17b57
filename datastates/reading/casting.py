"""Restores stored arrays into live arrays of another floating-point type: pieces are read, verified and converted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from datastates.container.rows import place_of
from datastates.container.table import Row
from datastates.executor.executor import Executor
from datastates.reading.proof import check_record
from datastates.reading.reads import Reads, Tally
from datastates.reading.tensors import TensorFile
from datastates.state import arrays, memory, parts, strides
from datastates.state.dtypes import BY_NAME, FLOATS
from datastates.state.shards import ArrayRef, Shard
from datastates.state.strides import span

WINDOW = 64 << 20
"""Largest number of bytes, in the stored type, that are in memory for conversion at the same time."""


@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """One live array that is restored by converting a stored one.

    Attributes:
        row: Any row of the stored logical tensor.
        shard: The live array.
        sources: The rows that hold elements of the live array, with their files; empty if another rank sends them.
    """

    row: Row
    shard: Shard
    sources: Sequence[tuple[TensorFile, Row]]

    @property
    def types(self) -> str:
        """The stored and the live element type, for a message."""
        return f"{self.row.dtype.name} to {self.shard.dtype}"


def are_convertible(row: Row, shard: Shard) -> bool:
    """Whether a live shard and a stored tensor have the same shape, and two element types that a restore converts."""
    types = {row.dtype.name, shard.dtype}
    return len(types) > 1 and types <= FLOATS and row.global_shape == shard.global_shape


def can_cast(row: Row, shard: Shard) -> bool:
    """Whether a live shard can be restored from a stored tensor by a conversion of its elements.

    Raises:
        ImportError: The stored type needs torch or ml_dtypes and neither is installed.
    """
    if not are_convertible(row, shard) or memory.why_not_writable(shard) is not None:
        return False
    _landing(row, shard, (0,))
    return True


def run(casts: Sequence[Cast], executor: Executor) -> Tally:
    """Read, verify and convert all arrays, with at most :data:`WINDOW` bytes of them in memory at the same time.

    Raises:
        CorruptError: Bytes do not match their checksum; some destinations have been overwritten by then.
        StorageError: Reading failed.
    """
    proven = _proven(casts)
    tally, nbytes, reads = Tally(0, 0, 0, 0, ()), 0, Reads(in_full=True)
    landed: list[tuple[Any, Any]] = []
    for cast in casts:
        if not cast.sources:
            continue
        most = max(1, WINDOW // cast.row.dtype.itemsize)
        for begin, size in parts.boxes(cast.shard.shape, most):
            if landed and nbytes + prod(size) * cast.row.dtype.itemsize > WINDOW:
                tally = _flush(reads, executor, landed, tally)
                landed, nbytes, reads = [], 0, Reads(in_full=True)
            nbytes += prod(size) * cast.row.dtype.itemsize
            piece = _piece(cast, begin, size)
            for source, row in cast.sources:
                reads.add(source, row, piece)
            landed.append((memory.region(cast.shard.source, begin, size), piece.source))
    tally = _flush(reads, executor, landed, tally) if landed else tally
    return replace(tally, unverified_keys=tuple(key for key in tally.unverified_keys if key not in proven))


def _proven(casts: Sequence[Cast]) -> set[str]:
    """Verify whole records of files without chunk checksums. After the conversion the stored bytes are no longer there.

    Returns:
        Keys of the stored arrays whose records all have a checksum, of chunks or of the whole record.
    """
    found: dict[tuple[int, int], bool] = {}
    proven = set()
    for cast in casts:
        known = []
        for source, row in cast.sources:
            if not source.checked and (at := (id(source), row.record)) not in found:
                found[at] = check_record(source, row.record, row.key)
            known.append(source.checked or found[at])
        if cast.sources and all(known):
            proven.add(cast.row.key)
    return proven


def conflict(casts: Sequence[Cast], restored: Iterable[Shard]) -> str | None:
    """Find a converted live array that shares memory with another restored array, although they were saved apart.

    Args:
        casts: The arrays to convert.
        restored: All array shards that are restored, the converted ones among them.

    Returns:
        The keys of the two arrays; None if there is no such pair.
    """
    if not casts:
        return None
    origins = {
        id(cast.shard): [(str(s.path), place_of(row), str(row.part)) for s, row in cast.sources]
        or [("", place_of(cast.row), "")]
        for cast in casts
    }
    found = [(*_memory(shard), shard.key, origins.get(id(shard))) for shard in restored if shard.part.numel]
    placed = sorted(found, key=lambda one: one[:2])
    furthest = 0
    for i in range(1, len(placed)):
        begin, end, key, origin = placed[i]
        _, last, other, other_origin = placed[furthest]
        if begin < last and not (origin is other_origin is None) and origin != other_origin:
            return f"{other}, {key}"
        if end > last:
            furthest = i
    return None


def _memory(shard: Shard) -> tuple[int, int]:
    """The addresses of a live shard's first byte and of the byte past its last."""
    assert shard.dtype is not None
    begin = arrays.address(shard.source)
    return begin, begin + span(shard.shape, shard.stride) * BY_NAME[shard.dtype].itemsize


def _flush(reads: Reads, executor: Executor, landed: Sequence[tuple[Any, Any]], before: Tally) -> Tally:
    now = reads.run(executor)
    for destination, landing in landed:
        memory.convert(destination, landing)
    return before + now


def _piece(cast: Cast, begin: tuple[int, ...], size: tuple[int, ...]) -> Shard:
    """Allocate memory in the stored type for a box of a live shard, and describe it as a part of the same tensor.

    ``begin`` and ``size`` are the box within the live shard, in elements.
    """
    shard, landing = cast.shard, _landing(cast.row, cast.shard, size)
    offset, flat = shard.offset, shard.flat
    if flat is not None:
        flat = flat[0] + begin[0], flat[0] + begin[0] + size[0]
    elif offset is not None:
        offset = tuple(o + b for o, b in zip(offset, begin, strict=True))
    return replace(
        shard,
        dtype=cast.row.dtype.name,
        kind="torch" if arrays.kind_of(landing) == "torch" else "numpy",
        shape=size,
        stride=strides.row_major(size),
        offset=offset,
        flat=flat,
        buffer=arrays.memory(landing),
        buffer_offset=0,
        source=landing,
    )


def _landing(row: Row, shard: Shard, size: tuple[int, ...]) -> Any:
    """Allocate an array of the stored type in host memory: a torch tensor for a torch tensor, else a NumPy array."""
    kind = "torch" if shard.kind == "torch" else "numpy"
    return memory.empty(ArrayRef(row.key, kind, row.dtype.name, size, strides.row_major(size)))
