"""A rank's state in two containers: the arrays that several checkpoints have alike, which are kept, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from datastates._base import gc_pause
from datastates._base.columns import I64, U8, Bools
from datastates.container.index import Index
from datastates.container.partial_records import HASH_NBYTES, hashes_of, same_arrays, same_places
from datastates.executor.executor import Columns, PreparedWrite
from datastates.planning import write
from datastates.saving.collect import empty_part
from datastates.saving.container_frame import ContainerFrame, ContainerFraming
from datastates.saving.structure import Structure
from datastates.state.shards import HOST, Buffer, Shard


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """One of the two containers, planned.

    Attributes:
        frame: Its frame.
        prepared: Its plan in the form that the executor takes.
        source: For each of its sources, the number of its buffer in the whole structure; -1 for an empty part.
    """

    frame: ContainerFrame
    prepared: PreparedWrite
    source: I64

    def columns(self, whole: Columns) -> Columns:
        """The memory of its sources, given that of all buffers."""
        pointers, devices, streams = whole
        none, at, zero = self.source < 0, self.source, np.uint64(0)
        devices = np.where(none, np.int32(HOST), devices[at])
        return np.where(none, zero, pointers[at]), devices, np.where(none, zero, streams[at])

    def hashes(self, of_source: Callable[[int], U8]) -> U8:
        """The hash of each of its chunks, in the order of its file; ``of_source`` gives those of a buffer."""
        none = np.zeros((0, HASH_NBYTES), np.uint8)
        every = [none, *(of_source(number) for number in self.source.tolist() if number >= 0)]
        return np.concatenate(every)[write.chunk_order(self.frame.plan)]

    def is_in(self, index: Index, hashes: U8) -> bool:
        """Whether a container has just its arrays, with these hashes."""
        known = hashes_of(index)
        is_same = known is not None and np.array_equal(known, hashes)
        return (
            is_same and same_places(self.frame.records, index.records) and same_arrays(self.frame.table, index.shards)
        )


def presumed(structure: Structure, live: Sequence[Any]) -> Bools:
    """For each buffer, whether it seems to be frozen: its tensors need no gradient, and others of their provider do.

    Args:
        structure: The state.
        live: The live array of each of its shards.
    """
    needs = np.array([bool(getattr(array, "requires_grad", False)) for array in live], bool)
    provider = np.array([p for p, _ in structure.arrays], np.int64)
    return structure.all_of(~needs & np.isin(provider, provider[needs]))


@gc_pause.paused()
def divide(structure: Structure, kept: Bools, block: int) -> tuple[Half, Half]:
    """Plan a state in two containers: the rest, with an empty part in the place of each kept array, and the kept one.

    Args:
        structure: The whole state.
        kept: For each buffer, whether it is kept.
        block: Longest extent in bytes.
    """
    arrays = list(zip(structure.arrays, structure.source, strict=True))
    providers = {p: n for n, p in enumerate(sorted({p for (p, _), number in arrays if kept[number]}))}
    rest, apart = _Arrays(), _Arrays()
    for (p, shard), number in arrays:
        if kept[number]:
            apart.add(providers[p], shard, number, number)
            # tied arrays stay one array; other views of the same memory must not become one
            view = (number, shard.dtype, shard.kind, shard.shape, shard.stride, shard.buffer_offset)
            rest.add(p, empty_part(shard, 1), -1, view)
        else:
            rest.add(p, shard, number, number)
    names = tuple(structure.names[p] for p in providers)
    return rest.planned(structure, structure.names, block), apart.planned(structure, names, block)


class LastHalves:
    """The last state that was planned in two containers. The next one may use the plan again. Thread-safe."""

    def __init__(self) -> None:
        self._last: tuple[ContainerFrame, bytes, tuple[Half, Half]] | None = None

    def divide(self, structure: Structure, frame: ContainerFrame, kept: Bools, block: int) -> tuple[Half, Half]:
        """As :func:`divide`. ``frame`` is the frame of the state in one container, which says where it is the same."""
        last = self._last
        if last is None or last[0] is not frame or last[1] != kept.tobytes():
            self._last = last = frame, kept.tobytes(), divide(structure, kept, block)
        return last[2]


class _Arrays:
    """The arrays of one container."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, Shard]] = []
        self._source: list[int] = []
        self._numbers: dict[object, int] = {}
        self._of: list[int] = []

    def add(self, provider: int, shard: Shard, number: int, place: object) -> None:
        """Add an array of a buffer, -1 for an empty part. Arrays of the same ``place`` have one source."""
        source = self._numbers.setdefault(place, len(self._of))
        if source == len(self._of):
            self._of.append(number)
        self._rows.append((provider, shard))
        self._source.append(source)

    def planned(self, whole: Structure, names: tuple[str, ...], block: int) -> Half:
        """Plan the container. Of the structure, its framing looks only at what is given here."""
        buffers = [whole.buffers[number] if number >= 0 else Buffer(0, 0) for number in self._of]
        eager = [number >= 0 and whole.eager[number] for number in self._of]
        own = replace(whole, names=names, arrays=self._rows, buffers=buffers, source=self._source, eager=eager)
        return Half(*ContainerFraming(claims=True).plan(own, block), np.array(self._of, np.int64))
