"""What the providers describe for one snapshot, checked; what does not change is taken again for the next."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from datastates import arrays, collector
from datastates.dtypes import BY_NAME
from datastates.errors import ProviderError
from datastates.executor import Columns, columns
from datastates.plan import I64, U8
from datastates.protocol import Buffer, Shard, Shards, StateProvider, full_key, span, walk_unique


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """What the providers described, apart from what changes between two snapshots of the same state.

    Attributes:
        names: The providers' names.
        layouts: What each provider gave as its layout; None from one that gives plain lists.
        arrays: Array shards, each with its provider's number.
        buffers: The distinct buffers that the arrays lie in.
        source: For each array shard, the number of its buffer.
        eager: For each buffer, whether it must be captured at once.
        witness: For each buffer, 1 where a lazy array lies in it.
        columns: The buffers as the executor wants them.
        nbytes: Bytes of all buffers.
        counted: Numbers of the lazy array shards whose changes torch counts.
        addresses: Where their first elements are.
    """

    names: tuple[str, ...]
    layouts: tuple[tuple[Shard, ...] | None, ...]
    arrays: list[tuple[int, Shard]]
    buffers: list[Buffer]
    source: list[int]
    eager: list[bool]
    witness: U8
    columns: Columns
    nbytes: int
    counted: I64
    addresses: I64

    def key(self, i: int) -> str:
        """The full key of an array shard."""
        provider, shard = self.arrays[i]
        return full_key(self.names[provider], shard.key)

    def plan_key(self) -> tuple[Any, ...]:
        """Equal for two structures that the same plan serves: all but where things are in memory."""
        rows = tuple(
            (p, s.key, s.kind, s.dtype, s.shape, s.stride, s.global_shape, s.offset, s.flat, s.buffer_offset)
            for p, s in self.arrays
        )
        return self.names, rows, tuple(self.source), tuple(self.eager), tuple(b.nbytes for b in self.buffers)


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """What the providers described for one snapshot.

    Attributes:
        providers: The providers, in the caller's order.
        structure: The arrays; it may be that of an earlier snapshot.
        described: What each provider gave, which keeps the memory alive.
        sources: For each array shard, the live array.
        objects: Object shards, each with its provider's number.
    """

    providers: list[StateProvider]
    structure: Structure
    described: list[Sequence[Shard]]
    sources: list[object]
    objects: list[tuple[int, Shard]]


def collect(providers: Sequence[StateProvider], last: Structure | None = None) -> Collected:
    """Ask the providers for their shards, and check them; ``last`` is taken again where it still holds.

    Raises:
        TypeError, ValueError: Not providers, or two of one name.
        ProviderError: Two shards have the same key, or one does not lie in its buffer.
    """
    chosen = list(walk_unique(providers))
    described = [_shards_of(provider) for provider in chosen]
    sources: list[object] = []
    objects: list[tuple[int, Shard]] = []
    for p, shards in enumerate(described):
        if isinstance(shards, Shards):
            sources += shards.sources
            objects += [(p, shard) for shard in shards.objects]
        elif not all(isinstance(shard, Shard) for shard in shards):
            raise _no_list(chosen[p].name)
        else:
            sources += [shard.source for shard in shards if not shard.is_object]
            objects += [(p, shard) for shard in shards if shard.is_object]
    keys = {(p, shard.key) for p, shard in objects}
    if not all(isinstance(key, str) for _, key in keys):
        raise _no_list(chosen[next(p for p, key in keys if not isinstance(key, str))].name)
    if len(keys) < len(objects):
        p, key = next(k for k in keys if sum((p, s.key) == k for p, s in objects) > 1)
        raise ProviderError(f"two shards have the key {full_key(chosen[p].name, key)!r}")
    names = tuple(p.name for p in chosen)
    layouts = tuple(shards.layout if isinstance(shards, Shards) else None for shards in described)
    structure = last
    if last is None or names != last.names or None in layouts or not all(map(operator.is_, layouts, last.layouts)):
        structure = _structure(names, layouts, described, sources)
    assert structure is not None
    return Collected(chosen, structure, described, sources, objects)


@collector.paused()
def _structure(
    names: tuple[str, ...],
    layouts: tuple[tuple[Shard, ...] | None, ...],
    described: Sequence[Sequence[Shard]],
    sources: Sequence[object],
) -> Structure:
    """Check array shards and number their buffers."""
    rows: list[tuple[int, Shard]] = []
    buffers: list[Buffer] = []
    source: list[int] = []
    eager: list[bool] = []
    numbers: dict[tuple[object, ...], int] = {}
    seen: set[str] = set()
    for p, (shards, layout) in enumerate(zip(described, layouts, strict=True)):
        for shard in shards if layout is None else layout:
            if shard.is_object:
                continue
            if not isinstance(shard.key, str):
                raise _no_list(names[p])
            key = full_key(names[p], shard.key)
            if key in seen:
                raise ProviderError(f"two shards have the key {key!r}")
            seen.add(key)
            buffer = _checked_buffer(key, shard)
            place = (buffer.device, buffer.stream, buffer.pointer, buffer.nbytes, shard.dtype, shard.kind)
            if place not in numbers:
                numbers[place] = len(buffers)
                buffers.append(buffer)
                eager.append(False)
            rows.append((p, shard))
            source.append(numbers[place])
            eager[numbers[place]] |= not shard.lazy
    witness = np.zeros(len(buffers), np.uint8)
    witness[[number for (_, shard), number in zip(rows, source, strict=True) if shard.lazy]] = 1
    counted = [i for i, (_, shard) in enumerate(rows) if shard.lazy and arrays.has_version(sources[i])]
    _, addresses = arrays.witness([sources[i] for i in counted])
    nbytes = sum(b.nbytes for b in buffers)
    memory = columns(buffers)
    return Structure(
        names, layouts, rows, buffers, source, eager, witness, memory, nbytes, np.array(counted, np.int64), addresses
    )


def _shards_of(provider: StateProvider) -> Sequence[Shard]:
    try:
        shards = provider.shards()
    except ProviderError as error:
        raise ProviderError(f"{provider.name!r}: {error}") from error
    if not isinstance(shards, Sequence):
        raise _no_list(provider.name)
    return shards


def _no_list(name: str) -> ProviderError:
    return ProviderError(f"{name!r}: shards() must return a list of Shards with text for keys")


def _checked_buffer(key: str, shard: Shard) -> Buffer:
    if shard.dtype not in BY_NAME:
        raise ProviderError(f"{key!r} is of an unknown element type {shard.dtype!r}")
    itemsize = BY_NAME[shard.dtype].itemsize
    buffer = shard.buffer
    if buffer is None:
        raise ProviderError(f"{key!r} is an array without a buffer")
    if len(shard.shape) != len(shard.stride) or shard.buffer_offset < 0 or shard.buffer_offset % itemsize:
        raise ProviderError(f"{key!r} has strides that do not fit its shape, or an offset that does not fit its type")
    if shard.buffer_offset + span(shard.shape, shard.stride) * itemsize > buffer.nbytes:
        raise ProviderError(f"{key!r} reaches beyond its buffer of {buffer.nbytes} bytes")
    if min((*shard.shape, *shard.stride), default=0) < 0:
        raise ProviderError(f"{key!r} has a negative shape or stride")
    if (shard.offset is None) == (shard.flat is None):
        raise ProviderError(f"{key!r} must have either an offset (a box) or a flat range")
    return buffer
