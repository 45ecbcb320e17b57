"""Collects and checks the shards of all providers for one snapshot. The next snapshot reuses an unchanged structure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from datastates._base import gc_pause
from datastates._base.loaded import loaded
from datastates.errors import ProviderError
from datastates.executor.executor import columns
from datastates.planning import write
from datastates.saving.replicas import is_compared, plan_replicas
from datastates.saving.structure import Places, Structure
from datastates.state import dtensors, versions
from datastates.state.dtypes import BY_NAME
from datastates.state.known_layout import Knowledge
from datastates.state.parts import overlap
from datastates.state.provider import StateProvider, stored_name, walk_unique
from datastates.state.shards import EVERY_RANK, HOST, Buffer, Shard, Shards, full_key, objects_of


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """The state of one snapshot, as the providers described it. It keeps the state alive until :meth:`release`.

    Attributes:
        providers: The providers, in the caller's order.
        structure: The arrays without contents. An earlier snapshot's structure is used again while it holds.
        places: The present addresses of the structure's memory.
        described: The shards that each provider returned, which keep the memory alive.
        sources: For each array shard, the live array.
        memory: Objects that keep the arrays' memory alive, even if an array is given other memory.
        objects: Object shards, each with its provider's number.
    """

    providers: list[StateProvider]
    structure: Structure
    places: Places
    described: list[Sequence[Shard]]
    sources: list[object]
    memory: list[object]
    objects: list[tuple[int, Shard]]

    def release(self) -> None:
        """Drop all references to the state. The structure stays, but loses shards that hold the state."""
        for part in (self.providers, self.described, self.sources, self.memory, self.objects):
            part.clear()
        if self.structure.holds_state:
            self.structure.arrays.clear()
            self.structure.buffers.clear()


def collect(
    providers: Sequence[StateProvider],
    last: Structure | None = None,
    knowledge: Knowledge | None = None,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> Collected:
    """Ask the providers for their shards, and check them.

    Where several ranks hold the same array, one rank writes it. The others store an empty part, and all take a digest
    of what they hold.

    Args:
        providers: The providers.
        last: The structure of the last snapshot. It is returned again if it still holds.
        knowledge: The knowledge of the last snapshot's providers. New providers get it, and it is updated.
        rank: The number of this rank.
        ranks: The number of ranks that save together.

    Raises:
        TypeError: ``providers`` is not a list of providers.
        ValueError: Two providers have the same name.
        ProviderError: Two shards have the same key, a shard does not lie in its buffer, or it is described wrongly in
            another way.
    """
    chosen = list(walk_unique(providers))
    if knowledge is not None:
        knowledge.teach(chosen)
    for provider in chosen:
        provider.stand_beside(chosen)
    described = [_shards_of(provider) for provider in chosen]
    if knowledge is not None:
        knowledge.take(chosen)
    sources: list[object] = []
    memory: list[object] = []
    objects: list[tuple[int, Shard]] = []
    for p, shards in enumerate(described):
        if isinstance(shards, Shards):
            own, kept = shards.sources, shards.memory
        else:
            own, kept = [shard.source for shard in shards if not shard.is_object], None
        sources += own
        memory += _storages(own) if kept is None else kept
        objects += [(p, shard) for shard in objects_of(shards)]
    keys = {(p, shard.key) for p, shard in objects}
    if (untold := next((p for p, key in keys if not isinstance(key, str)), None)) is not None:
        raise _no_list(chosen[untold].name)
    if len(keys) < len(objects):
        p, key = next(k for k in keys if sum((p, s.key) == k for p, s in objects) > 1)
        raise ProviderError(f"two shards have the key {full_key(chosen[p].name, key)!r}")
    names = tuple(stored_name(p, rank, ranks) for p in chosen)
    layouts = tuple(shards.layout if isinstance(shards, Shards) else None for shards in described)
    structure, places = last, None
    if last is not None and last.serves(names, layouts):
        places = last.places_now(described)
    if structure is None or places is None:
        structure = _structure(names, layouts, described, sources, rank if ranks > 1 else None, ranks)
        places = structure.places()
    _check_objects(keys, structure)
    return Collected(chosen, structure, places, described, sources, memory, objects)


@gc_pause.paused()
def _structure(
    names: tuple[str, ...],
    layouts: tuple[tuple[Shard, ...] | None, ...],
    described: Sequence[Sequence[Shard]],
    sources: Sequence[object],
    rank: int | None,
    ranks: int,
) -> Structure:
    """Check array shards and number their buffers; ``rank`` is None if there is only one rank."""
    rows = _checked_rows(names, layouts, described)
    begins = [s.buffer.pointer if s.buffer and s.buffer.nbytes else 0 for _, s in rows]
    left = {} if rank is None else _leave_to_owners(rows, names, rank, ranks)
    held = [left.get(i, shard) for i, (_, shard) in enumerate(rows)]
    replicas = None
    if rank is not None:
        replicas = plan_replicas([(i, shard) for i, shard in enumerate(held) if is_compared(shard)])
    buffers: list[Buffer] = []
    source: list[int] = []
    eager: list[bool] = []
    numbers: dict[tuple[object, ...], int] = {}
    for i, (_, shard) in enumerate(rows):
        buffer = shard.buffer
        assert buffer is not None
        # empty parts of different tensors may have the same address, but each needs a buffer of its own
        own = i if not buffer.nbytes and shard.shape != shard.global_shape and i not in left else -1
        place = (buffer.device, buffer.stream, buffer.pointer, buffer.nbytes, shard.dtype, shard.kind, own)
        number = numbers.setdefault(place, len(buffers))
        if number == len(buffers):
            buffers.append(buffer)
            eager.append(False)
        source.append(number)
        if not shard.lazy:
            eager[number] = True
    witness = np.zeros(len(buffers), np.uint8)
    witness[[number for (_, shard), number in zip(rows, source, strict=True) if shard.lazy]] = 1
    versioned = (yes for shards in described for yes in _have_versions(shards))
    counted = [i for i, yes in enumerate(versioned) if yes and held[i].lazy]
    _, addresses = versions.witness([sources[i] for i in counted])
    nbytes = sum(b.nbytes for b in buffers)
    placed = [(i, number) for i, number in enumerate(source) if i not in left and buffers[number].nbytes]
    return Structure(
        names=names,
        layouts=layouts,
        arrays=rows,
        buffers=buffers,
        source=source,
        eager=eager,
        witness=witness,
        columns=columns(buffers),
        begins=np.array(begins, np.uint64),
        placed=(np.array([i for i, _ in placed], np.int64), np.array([number for _, number in placed], np.int64)),
        devices=sorted({b.device for b in buffers}.union(replicas.devices if replicas else ()) - {HOST}),
        nbytes=nbytes,
        counted=np.array(counted, np.int64),
        addresses=addresses,
        donatable=[i for i, s in enumerate(held) if s.kind == "jax" and s.buffer and s.buffer.device != HOST],
        replicas=replicas,
        in_part=_in_part(rows, names, sources) if rank is None else None,
    )


def _in_part(rows: list[tuple[int, Shard]], names: tuple[str, ...], sources: Sequence[object]) -> str | None:
    """The full key of a JAX array or DTensor that lacks elements; None if there is none. Parts must not overlap."""
    left: dict[tuple[int, str], int] = {}
    for (p, shard), source in zip(rows, sources, strict=True):
        if (shard.kind == "jax" or dtensors.is_dtensor(source)) and shard.shape != shard.global_shape:
            left.setdefault((p, shard.key), math.prod(shard.global_shape))
            left[p, shard.key] -= math.prod(shard.shape)
    return next((full_key(names[p], key) for (p, key), elements in left.items() if elements), None)


def _checked_rows(
    names: tuple[str, ...],
    layouts: tuple[tuple[Shard, ...] | None, ...],
    described: Sequence[Sequence[Shard]],
) -> list[tuple[int, Shard]]:
    rows: list[tuple[int, Shard]] = []
    for p, (shards, layout) in enumerate(zip(described, layouts, strict=True)):
        if isinstance(shards, Shards) and shards.addresses is not None:
            own = [shards.placed(i) for i in range(len(shards.layout))]
        else:
            own = [shard for shard in (shards if layout is None else layout) if not shard.is_object]
        _check_keys(names[p], own)
        for shard in own:
            if (flaw := _flaw(shard)) is not None:
                raise ProviderError(f"{full_key(names[p], shard.key)!r} {flaw}")
        rows += [(p, shard) for shard in own]
    return rows


def _leave_to_owners(rows: list[tuple[int, Shard]], names: tuple[str, ...], rank: int, ranks: int) -> dict[int, Shard]:
    """Replace each array that another rank writes by an empty part; returns the replaced shards by their numbers.

    Arrays that share memory have the same owner: they are written once, and share one record.

    Raises:
        ProviderError: The ``replicas`` of an array lack this rank, or name a rank that does not save.
    """
    left: dict[int, Shard] = {}
    for i, (p, shard) in enumerate(rows):
        if shard.replicas == EVERY_RANK:
            rows[i] = p, replace(shard, replicas=tuple(range(ranks)))
    shared = [i for i, (_, shard) in enumerate(rows) if len(shard.replicas) > 1]
    for i in shared:
        p, shard = rows[i]
        if rank not in shard.replicas:
            key = full_key(names[p], shard.key)
            raise ProviderError(f"{key!r}: its replicas, ranks {shard.replicas}, are without this rank, {rank}")
        if max(shard.replicas) >= ranks:
            key = full_key(names[p], shard.key)
            raise ProviderError(
                f"{key!r}: ranks {shard.replicas} are said to hold it, but only {ranks} ranks save together: let all "
                "of them save, or say ReplicatedProvider(..., ranks=...) with their numbers among those that do"
            )
    groups: dict[tuple[object, ...], list[int]] = {}
    for i in shared:
        groups.setdefault((rows[i][1].replicas, *_memory(rows[i])), []).append(i)
    owned: list[int | None] = []
    parts = []
    for members in groups.values():
        owned.append(_owner_of(rows[i][1] for i in members))
        # the offset tells several parts of one tensor apart
        first = min(f"{full_key(names[p], s.key)} {s.offset}" for p, s in (rows[i] for i in members))
        _, shard = rows[members[0]]
        assert shard.buffer is not None
        parts.append((first, shard.buffer.nbytes, shard.replicas))
    views: dict[tuple[object, ...], int] = {}
    shared_out = iter(write.owners([part for part, owner in zip(parts, owned, strict=True) if owner is None]))
    for members, only in zip(groups.values(), owned, strict=True):
        owner = next(shared_out) if only is None else only
        for i in members if owner != rank else ():
            p, shard = rows[i]
            # tied arrays must stay one array; different views of the same memory must not become one
            view = (*_memory(rows[i]), shard.dtype, shard.kind, shard.shape, shard.stride, shard.buffer_offset)
            rows[i] = p, empty_part(shard, views.setdefault(view, len(views) + 1))
            left[i] = shard
    return left


def _owner_of(shards: Iterable[Shard]) -> int | None:
    """The rank that must write arrays that share memory; None if any of the ranks that hold them may."""
    for shard in shards:
        if shard.owner is not None or not shard.lazy:
            return min(shard.replicas) if shard.owner is None else shard.owner
    return None


def _memory(row: tuple[int, Shard]) -> tuple[object, ...]:
    """A tuple that is equal for two array shards if they have the same buffer. An empty array has its own."""
    buffer = row[1].buffer
    assert buffer is not None
    return (buffer.device, buffer.pointer, buffer.nbytes) if buffer.nbytes else (row[0], row[1].key)


def empty_part(shard: Shard, number: int) -> Shard:
    """Make an empty part of an array. Only empty parts with the same ``number`` share a record."""
    nothing = Buffer(number, 0)
    return replace(
        shard, shape=(0,), stride=(1,), offset=None, flat=(0, 0), lazy=False, buffer=nothing, buffer_offset=0
    )


def _have_versions(shards: Sequence[Shard]) -> list[bool]:
    """For each array shard, whether torch counts its changes in place."""
    if isinstance(shards, Shards):
        return [version >= 0 for version in shards.versions.tolist()]
    return [versions.has_version(s.source) for s in shards if not s.is_object]


def _shards_of(provider: StateProvider) -> Sequence[Shard]:
    try:
        shards = provider.shards()
    except ProviderError as error:
        raise ProviderError(f"{provider.name!r}: {error}") from error
    if not (isinstance(shards, Shards) or (isinstance(shards, Sequence) and all(isinstance(s, Shard) for s in shards))):
        raise _no_list(provider.name)
    return shards


def _no_list(name: str) -> ProviderError:
    return ProviderError(f"{name!r}: shards() must return a list of Shards with text for keys")


def _check_objects(keys: set[tuple[int, str]], structure: Structure) -> None:
    """Refuse an object that has an array's key, and any object beside one with the empty key."""
    apart = {(p, key) for p, key in keys if key}
    if not apart:
        return
    for p, key in apart.intersection((p, shard.key) for p, shard in structure.arrays):
        raise ProviderError(f"two shards have the key {full_key(structure.names[p], key)!r}: an array and an object")
    for p, key in apart:
        if (p, "") in keys:
            name = structure.names[p]
            raise ProviderError(f"{full_key(name, key)!r} is an object beside {name!r}, which is an object as a whole")


def _check_keys(name: str, shards: list[Shard]) -> None:
    keys = [shard.key for shard in shards]
    if not all(isinstance(key, str) for key in keys):
        raise _no_list(name)
    if len(set(keys)) < len(keys):
        same: dict[str, list[Shard]] = {}
        for shard in shards:
            same.setdefault(shard.key, []).append(shard)
        for key, parts in same.items():
            if len(parts) > 1:
                _check_parts(full_key(name, key), parts)


def _check_parts(key: str, shards: list[Shard]) -> None:
    """Refuse shards of one key, unless they are parts of one tensor that do not overlap."""
    if any(shard.part.is_whole for shard in shards):
        raise ProviderError(f"two shards have the key {key!r}")
    if len({(shard.dtype, shard.global_shape, shard.offset is None) for shard in shards}) > 1:
        raise ProviderError(f"{key!r} is described as parts of tensors of different types or shapes")
    if overlap([shard.part for shard in shards]):
        raise ProviderError(f"{key!r} is described by parts that overlap")


def _flaw(shard: Shard) -> str | None:
    """The fault of an array shard, to follow its key in a message; None if there is none."""
    if (dtype := BY_NAME.get(shard.dtype or "")) is None:
        return f"is of an unknown element type {shard.dtype!r}"
    if shard.buffer is None:
        return "is an array without a buffer"
    if len(shard.shape) != len(shard.stride) or shard.buffer_offset < 0 or shard.buffer_offset % dtype.itemsize:
        return "has strides that do not fit its shape, or an offset that does not fit its type"
    elements = 1
    for size, step in zip(shard.shape, shard.stride, strict=True):
        if size < 0 or step < 0:
            return "has a negative shape or stride"
        elements += (size - 1) * step
    if shard.buffer_offset + (0 if 0 in shard.shape else elements * dtype.itemsize) > shard.buffer.nbytes:
        return f"reaches beyond its buffer of {shard.buffer.nbytes} bytes"
    return shard.buffer.flaw or shard.part.flaw


def _storages(values: Sequence[Any]) -> list[object]:
    """The storages of the torch tensors among the values.

    A storage keeps its memory alive, even if its tensor is given other memory (``tensor.data = ...``).
    """
    torch: Any = loaded("torch")
    if torch is None:
        return []
    types = set(map(type, values))
    if not types <= {torch.Tensor, torch.nn.Parameter}:  # the usual classes need no filter
        values = [dtensors.local(value) for value in values if isinstance(value, torch.Tensor)]
    return list(map(torch.Tensor.untyped_storage, values))
