"""A checkpoint of several ranks without files: what providers describe, put together by logical tensor."""

from __future__ import annotations

import ctypes
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from datastates.state import dtensors, dtypes, memory
from datastates.state.keys import join
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import ArrayRef, Shard


def elements(shard: Shard) -> torch.Tensor:
    """A copy of an array shard's elements, read from its buffer: what would be saved."""
    assert shard.buffer is not None
    data = ctypes.string_at(shard.buffer.pointer, shard.buffer.nbytes)[shard.buffer_offset :]
    flat = torch.frombuffer(bytearray(data or b"\0" * 8), dtype=getattr(torch, str(shard.dtype)))
    return flat.as_strided(shard.shape, shard.stride).clone()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The logical tensor, which the ranks gather if it is a DTensor."""
    return (tensor.full_tensor() if dtensors.is_dtensor(tensor) else tensor).detach()  # type: ignore[operator]


class Checkpoint:
    """Logical tensors by key, how often each of their elements was saved, and the objects of each rank."""

    def __init__(self) -> None:
        self.arrays: dict[str, torch.Tensor] = {}
        self.others: list[str] = []
        """Keys of arrays that only other ranks saved: they are found, and are not listed."""
        self.kinds: dict[str, str] = {}
        self.times: dict[str, torch.Tensor] = {}
        self.empty: list[str] = []
        self.objects: list[dict[str, Any]] = []
        self.nbytes = 0

    @classmethod
    def of(cls, ranks: Sequence[StateProvider]) -> Checkpoint:
        self = cls()
        for provider in ranks:
            self.add(describe(provider))
        return self

    def add(self, rank: dict[str, Any]) -> None:
        for key, kind, shape, place, part in rank["arrays"]:
            whole = self.arrays.setdefault(key, torch.zeros(shape, dtype=part.dtype))
            times = self.times.setdefault(key, torch.zeros(shape, dtype=torch.int32))
            assert (tuple(whole.shape), whole.dtype) == (tuple(shape), part.dtype), key
            self.kinds[key] = kind
            if not whole.numel():
                self.empty.append(key)
            for tensor, new in ((whole, part), (times, torch.ones_like(part, dtype=torch.int32))):
                into = _view(tensor, place, tuple(part.shape))
                into.copy_(new if tensor is whole else into + new)
        self.objects.append(rank["objects"])
        self.nbytes += rank["nbytes"]

    @property
    def is_tiled(self) -> bool:
        """Whether each element of each logical tensor, and each tensor without any, was saved once."""
        every = all(bool((times == 1).all()) for times in self.times.values())
        return every and len(set(self.empty)) == len(self.empty)

    def restore(self, provider: StateProvider, rank: int = 0) -> InMemory:
        """Restore one rank: with its own objects, or those of rank 0."""
        saved = InMemory(self, self.objects[rank if rank < len(self.objects) else 0])
        saved.restore(provider)
        return saved


def describe(provider: StateProvider) -> dict[str, Any]:
    """What one rank saves, as plain values that travel between processes."""
    shards = provider.shards()
    found = [
        (s.key, s.kind, s.global_shape, s.offset if s.flat is None else s.flat, elements(s))
        for s in shards
        if not s.is_object
    ]
    objects = {}
    for shard in shards:
        if shard.is_object:
            encoded = provider.serialize(shard)
            assert isinstance(encoded, bytes)
            objects[shard.key] = pickle.loads(encoded)
    buffers = {(s.buffer.pointer, s.buffer.nbytes) for s in shards if s.buffer is not None}
    return {"arrays": found, "objects": objects, "nbytes": sum(nbytes for _, nbytes in buffers)}


def of_state_dict(state: Any, others: Mapping[str, torch.Tensor] | None = None) -> Checkpoint:
    """What ``from_stateful`` would save: the arrays by their path, and one object for all.

    ``others``: arrays that only other ranks saved, by key. The object does not name them.
    """
    checkpoint = Checkpoint()

    def add(key: str, tensor: torch.Tensor) -> torch.Tensor:
        checkpoint.arrays[key], checkpoint.kinds[key] = whole(tensor).clone(), "torch"
        return checkpoint.arrays[key]

    def walk(item: Any, key: str) -> Any:
        if isinstance(item, torch.Tensor):
            return _reference(key, "torch", add(key, item))
        if isinstance(item, dict):
            return {k: walk(v, join(key, k)) for k, v in item.items()}
        if isinstance(item, (list, tuple)):
            return type(item)([walk(v, join(key, i)) for i, v in enumerate(item)])
        return item

    checkpoint.objects.append({"": walk(state, "")})
    for key, tensor in (others or {}).items():
        add(key, tensor)
        checkpoint.others.append(key)
    return checkpoint


class InMemory(Saved):
    """One rank's view of a ``Checkpoint``."""

    strict = True

    def __init__(self, checkpoint: Checkpoint, objects: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._objects = objects
        self.ranks = max(len(checkpoint.objects), 2 if checkpoint.others else 1)
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: dict[str, str] = {}
        self.read: list[Shard] = []
        """The arrays that were restored."""

    @property
    def differences(self) -> list[str]:
        return [*self.missing, *self.unexpected, *self.mismatched]

    def arrays(self) -> Mapping[str, ArrayRef]:
        return _Arrays(self._checkpoint)

    def every_key(self) -> Sequence[str]:
        return list(self._checkpoint.arrays)

    def sharing(self, keys: Sequence[str]) -> Sequence[Mapping[str, int]]:
        return []

    def objects(self) -> Sequence[str]:
        return list(self._objects)

    def report(
        self,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, str] | None = None,
    ) -> None:
        self.missing += missing
        self.unexpected += unexpected
        self.mismatched |= mismatched or {}

    def restored_keys(self) -> Sequence[str]:
        return self.every_key()

    def structure(self, key: str) -> object:
        return self._objects[key]

    def structures_beside(self, key: str, arrays: Sequence[str]) -> Iterator[object]:
        return iter(())

    def restore(self, provider: StateProvider) -> None:
        """Compare, and restore what fits, as the engine does."""
        stored = self.arrays()
        shards = provider.destinations(self)
        targets = {}
        for shard in shards:
            if shard.is_object:
                continue
            ref = stored[shard.key]
            if (ref.shape, ref.dtype) != (shard.global_shape, shard.dtype):
                self.mismatched[shard.key] = f"{ref.dtype} of {ref.shape}, {shard.dtype} of {shard.global_shape}"
                continue
            assert math.prod(shard.shape) * dtypes.BY_NAME[ref.dtype].itemsize == shard.nbytes
            place = shard.offset if shard.flat is None else shard.flat
            part = _view(self._checkpoint.arrays[shard.key], place, shard.shape)
            if shard.kind == "numpy":
                np.copyto(shard.source, part.numpy())
            else:
                memory.assign(shard.source, part)
            targets[shard.key] = shard.source
            self.read.append(shard)
        for shard in shards:
            if shard.is_object:
                provider.restore(shard, _build(self._objects[shard.key], targets))


class _Arrays(Mapping[str, ArrayRef]):
    """The arrays as one rank sees them: it lists its own, and finds all."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __len__(self) -> int:
        return len(self._checkpoint.arrays) - len(self._checkpoint.others)

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._checkpoint.arrays if key not in self._checkpoint.others)

    def __contains__(self, key: object) -> bool:
        return key in self._checkpoint.arrays

    def __getitem__(self, key: str) -> ArrayRef:
        return _reference(key, self._checkpoint.kinds[key], self._checkpoint.arrays[key])


def _build(value: Any, targets: Mapping[str, object]) -> Any:
    if isinstance(value, ArrayRef):
        return targets.get(value.key, value)
    if isinstance(value, dict):
        return {k: _build(v, targets) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_build(v, targets) for v in value])
    return value


def _reference(key: str, kind: str, tensor: torch.Tensor) -> ArrayRef:
    return ArrayRef(key, kind, str(tensor.dtype)[6:], tuple(tensor.shape), tensor.stride())


def _view(whole: torch.Tensor, place: Sequence[int], shape: tuple[int, ...]) -> torch.Tensor:
    if len(shape) == 1 and len(place) == 2:  # a flat range
        return whole.reshape(-1)[place[0] : place[1]]
    return whole[tuple(slice(b, b + n) for b, n in zip(place, shape, strict=True))]
