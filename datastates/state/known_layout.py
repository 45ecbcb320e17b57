"""Describing the same arrays at every snapshot: an unchanged layout is recognized and reused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from datastates._base import gc_pause
from datastates.state import arrays, devices, dtypes, tensor_scan
from datastates.state.provider import StateProvider
from datastates.state.shards import Buffer, Shard, Shards
from datastates.state.strides import aligned, are_row_major, span


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A description of a provider's arrays at the last snapshot. It has addresses but keeps no memory alive.

    Attributes:
        keys: Keys of the arrays within the provider.
        lazy: Whether each array is lazy.
        places: Types, addresses and layouts of all tensors, encoded; see :class:`~datastates.state.tensor_scan.Look`.
        specs: Properties of DTensors; see :func:`datastates.state.dtensors.specs`. None without DTensors.
        streams: Library, device number and stream handle of all buffers, each combination once.
        layout: The shards, without arrays.
    """

    keys: Sequence[str]
    lazy: Sequence[bool]
    places: bytes
    specs: list[object] | None
    streams: set[tuple[str, int, int]]
    layout: tuple[Shard, ...]

    def serves(self, keys: Sequence[str], lazy: Sequence[bool], seen: tensor_scan.Look) -> bool:
        """Whether the description still holds for these keys and the tensors that ``seen`` was read from."""
        return (
            keys == self.keys
            and lazy == self.lazy
            and seen.places == self.places
            and seen.specs == self.specs
            and all(devices.current_stream(kind, device) == stream for kind, device, stream in self.streams)
        )


class Describer:
    """Describes a provider's arrays, and returns the same layout as long as only their contents change.

    Not thread-safe.

    Attributes:
        known: The last description, which can be given to another describer; None if it cannot be recognized again.
    """

    def __init__(self) -> None:
        """Begin without a description."""
        self.known: Known | None = None

    def again(
        self, keys: Sequence[str], values: Sequence[object], lazy: Callable[[Sequence[Any]], Sequence[bool]]
    ) -> Shards | None:
        """Describe the arrays by the last snapshot's shards; None if keys, addresses or layouts have changed.

        ``lazy`` tells whether each array is lazy, given the storages of all of them, which are tensors.
        """
        if self.known is None:
            return None
        seen = tensor_scan.look(values, known=self.known.places, memory=True)
        if seen is None or not self.known.serves(keys, lazy(seen.memory), seen):
            return None
        return Shards(self.known.layout, values, versions=seen.versions, memory=seen.memory)

    def describe(self, keys: Sequence[str], values: Sequence[object], lazy: Sequence[bool]) -> Sequence[Shard]:
        """Describe the arrays as shards; takes and raises the same as :func:`datastates.state.arrays.shards_of`."""
        if (same := self.again(keys, values, lambda _: lazy)) is not None:
            return same
        self.known = None
        with gc_pause.paused():
            seen = tensor_scan.look(values, memory=True)
            if seen is None:
                return arrays.shards_of(keys, values, lazy)
            layout = _alone(keys, values, lazy)
            rest = [i for i, shard in enumerate(layout) if shard is None]
            others = arrays.shards_of([keys[i] for i in rest], [values[i] for i in rest], [lazy[i] for i in rest])
            if not _are_live(others):
                return arrays.shards_of(keys, values, lazy)
            for i, s in zip(rest, others, strict=True):
                layout[i] = replace(s, source=None, buffer=s.buffer and replace(s.buffer, owner=None))
            shards = tuple(shard for shard in layout if shard is not None)
            streams = {(s.kind, s.buffer.device, s.buffer.stream) for s in shards if s.buffer is not None}
        self.known = Known(list(keys), list(lazy), seen.places, seen.specs, streams, shards)
        return Shards(shards, values, versions=seen.versions, memory=seen.memory)


class Knowledge:
    """Keeps what the last snapshot's providers found out about the form of their states, for new provider objects.

    It is kept by the providers' names; see :meth:`StateProvider.knowledge`.
    """

    def __init__(self) -> None:
        """Begin without knowledge."""
        self._known: dict[str, tuple[type, object]] = {}

    def teach(self, providers: Sequence[StateProvider]) -> None:
        """Hand each provider that has no knowledge of its own the knowledge kept for its name and class."""
        for provider in providers:
            kind, known = self._known.get(provider.name, (None, None))
            if kind is type(provider) and provider.knowledge() is None:
                provider.learn(known)

    def take(self, providers: Sequence[StateProvider]) -> None:
        """Keep the knowledge of these providers, and forget all other knowledge."""
        found = ((provider, provider.knowledge()) for provider in providers)
        self._known = {p.name: (type(p), known) for p, known in found if known is not None}

    def __bool__(self) -> bool:
        """Whether the knowledge of any provider is kept."""
        return bool(self._known)


def _alone(keys: Sequence[str], values: Sequence[Any], lazy: Sequence[bool]) -> list[Shard | None]:
    """Describe each contiguous torch tensor that shares no storage by a shard without the array; None for others."""
    seen = tensor_scan.layout(values)
    if seen is None:
        return [None] * len(values)
    storages = [t.untyped_storage().data_ptr() for t in values]
    views = Counter(storages)
    ndim = seen.ndim.astype(np.int64)
    starts, width = np.cumsum(ndim) - ndim, int(ndim.max(initial=0))
    shapes, steps = (aligned(column, starts, ndim, width, 1) for column in (seen.dims, seen.strides))
    contiguous = are_row_major(shapes, steps)
    nbytes = shapes.prod(axis=1) * tensor_scan.ITEMSIZES[seen.dtype].astype(np.int64)
    places = zip(
        seen.address.tolist(),
        nbytes.tolist(),
        seen.device.tolist(),
        devices.streams(seen.device).tolist(),
        strict=True,
    )
    names = [dtype.name for dtype in dtypes.ALL]
    dims, strides = seen.dims.tolist(), seen.strides.tolist()
    at = zip(starts.tolist(), (starts + ndim).tolist(), strict=True)
    rows = zip(keys, lazy, seen.dtype.tolist(), at, places, contiguous.tolist(), storages, strict=True)
    return [
        Shard(
            key=key,
            dtype=names[dtype],
            kind="torch",
            shape=(shape := tuple(dims[a:b])),
            stride=tuple(strides[a:b]),
            global_shape=shape,
            offset=(0,) * (b - a),
            lazy=is_lazy,
            buffer=Buffer(*place),
        )
        if straight and views[storage] == 1
        else None
        for key, is_lazy, dtype, (a, b), place, straight, storage in rows
    ]


def _are_live(shards: Sequence[Shard]) -> bool:
    """Whether all buffers are exactly the arrays' own memory: no copies, and no gaps between views."""
    members: dict[int, tuple[Buffer, list[Shard]]] = {}
    for shard in shards:
        if shard.buffer is None or arrays.address(shard.source) != shard.buffer.pointer + shard.buffer_offset:
            return False
        if "complex" in str(shard.dtype):
            return False  # the tensor may be conjugated at the next snapshot, which `look` does not see
        members.setdefault(id(shard.buffer), (shard.buffer, []))[1].append(shard)
    for _, views in members.values():
        end = 0
        for view in sorted(views, key=lambda s: s.buffer_offset) if len(views) > 1 else ():
            assert view.dtype is not None
            if view.buffer_offset > end:
                return False
            end = max(end, view.buffer_offset + span(view.shape, view.stride) * dtypes.BY_NAME[view.dtype].itemsize)
    return True
