"""What a state is made of: :class:`Buffer`, :class:`Shard`, and the arrays inside of objects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from datastates._base.columns import I64
from datastates.state import dtypes, keys
from datastates.state.parts import Part


@dataclass(slots=True, eq=False)
class ArrayLeaf:
    """An array inside an object that is being written.

    Attributes:
        key: The key, within the provider, of the array shard that holds it.
        requires_grad: torch's flag.
        parameter: Whether it is a ``torch.nn.Parameter``.
        kind: The subclass of tensors that it is of.
        attributes: What it has beside its elements.
    """

    key: str
    requires_grad: bool = False
    parameter: bool = False
    kind: Any = None
    attributes: Any = None


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Where the elements of an array are in the container, as ``data.pkl`` says it.

    Attributes:
        record: Name of the storage record (the part after ``data/``).
        dtype: Element type.
        offset: Elements from the record's begin.
        shape: Elements along each dimension.
        stride: Elements to step along each dimension.
        elements: Elements of that type in the whole record.
        requires_grad: torch's flag.
    """

    record: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    elements: int
    requires_grad: bool = False


HOST = -1
"""The device number of host memory; GPUs count from 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A range of memory that one record of the container holds; shards that share it share the record.

    Attributes:
        pointer: Address of the first byte, on the host or on the device.
        nbytes: Its length in bytes.
        device: CUDA device number, or :data:`HOST`.
        stream: Handle of the CUDA stream whose earlier work produced the contents; unused for host memory.
        owner: What keeps the memory alive; held until the snapshot is captured.
    """

    pointer: int
    nbytes: int
    device: int = HOST
    stream: int = 0
    owner: object = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One part of the state: an array, or part of one, or an object that must be serialized.

    An array shard lies in ``buffer`` at ``buffer_offset`` with ``shape`` and ``stride``. It is the whole of its logical
    tensor, or one part of it: a box (``offset`` says where in ``global_shape``) or a flat range (``flat`` counts
    elements of the flattened logical tensor, as ZeRO partitions do; then ``shape`` is one-dimensional).

    Attributes:
        key: Name within the provider, unique there among arrays and among objects. It is the path below the provider's
            name, of components joined by ``/`` (:func:`datastates.state.keys.join` makes one): what ``load()`` nests
            by, what errors name, and what a restore finds the contents by, on any number of ranks. So it is the same at
            each snapshot and on each rank. Of an object shard, the empty key means: the provider's whole value.
        dtype: A name out of :data:`datastates.state.dtypes.BY_NAME`; None for an object.
        kind: Which library's array it is: ``"torch"``, ``"numpy"`` or ``"cupy"``; ``"object"`` for an object.
        shape: Elements along each dimension, of this part.
        stride: Elements to step along each dimension.
        global_shape: Shape of the logical tensor.
        offset: Where the box begins in it; None for a flat range.
        flat: First and one past the last element of a flat range; None for a box.
        replicas: The ranks, this one among them, ascending, that hold this very part alike: one of them writes it.
            Empty when no other does.
        lazy: True when it stays unchanged until ``Snapshot.captured``; False when it must be copied inside
            ``snapshot()`` because the forward pass, or anybody, may change it at any time.
        buffer: The memory it lies in; None for an object.
        buffer_offset: Bytes from the buffer's begin to the first element.
        source: The array or object itself.
    """

    key: str
    dtype: str | None
    kind: str
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    global_shape: tuple[int, ...] = ()
    offset: tuple[int, ...] | None = ()
    flat: tuple[int, int] | None = None
    replicas: tuple[int, ...] = ()
    lazy: bool = False
    buffer: Buffer | None = None
    buffer_offset: int = 0
    source: object = field(default=None, repr=False)

    @property
    def is_object(self) -> bool:
        """Whether this shard must be serialized rather than copied."""
        return self.dtype is None

    @property
    def part(self) -> Part:
        """Which part of its logical tensor an array shard is."""
        return Part(self.global_shape, self.shape, self.offset, self.flat)

    @property
    def nbytes(self) -> int | None:
        """Bytes of the elements; None for an object: known only after serializing."""
        return None if self.dtype is None else math.prod(self.shape) * dtypes.BY_NAME[self.dtype].itemsize


class Shards(Sequence[Shard]):
    """Array shards, what they look like kept apart from the arrays themselves, and object shards after them.

    A provider that gives the very same ``layout`` again says that nothing but the contents of its arrays has changed:
    not a key, a type, a shape, an address or a stream. A snapshot then asks no array for anything.

    Attributes:
        layout: The array shards without ``source``, their buffers without ``owner``: it keeps no memory alive.
        sources: For each of them, the live array.
        versions: For each of them, torch's count of its changes in place; -1 without one.
        memory: What keeps the memory of all of them alive, whatever other memory they are given; None where a snapshot
            is to ask them.
        objects: The object shards.
    """

    def __init__(
        self,
        layout: tuple[Shard, ...],
        sources: Sequence[object],
        objects: Sequence[Shard] = (),
        *,
        versions: I64,
        memory: Sequence[object] | None = None,
    ) -> None:
        """Join them; ``layout``, ``sources`` and ``versions`` are of the same length."""
        self.layout = layout
        self.sources = sources
        self.objects = objects
        self.versions = versions
        self.memory = memory

    def __len__(self) -> int:
        return len(self.layout) + len(self.objects)

    @overload
    def __getitem__(self, i: int) -> Shard: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Shard]: ...
    def __getitem__(self, i: int | slice) -> Shard | Sequence[Shard]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        if i >= len(self.layout):
            return self.objects[i - len(self.layout)]
        shard, source = self.layout[i], self.sources[i]
        buffer = shard.buffer and replace(shard.buffer, owner=source)
        return replace(shard, source=source, buffer=buffer)


def object_shard(key: str = "", *, lazy: bool = False, source: object = None) -> Shard:
    """Describe an object that :meth:`StateProvider.serialize` turns into bytes."""
    return Shard(key=key, dtype=None, kind="object", lazy=lazy, source=source)


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """An array as a checkpoint describes it, before it has been read.

    Attributes:
        key: The stored shard's key within its provider; one of them where several shards are the same memory.
        kind: Which library it came from.
        dtype: Its element type's name.
        shape: Elements along each dimension.
        stride: Elements to step along each dimension.
        requires_grad: As torch knows it; False for other kinds.
        parameter: Whether it is a ``torch.nn.Parameter`` where an object refers to it.
    """

    key: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    parameter: bool = False

    def as_parameter(self, requires_grad: bool) -> ArrayRef:
        """It as a parameter."""
        return replace(self, requires_grad=requires_grad, parameter=True)


def full_key(provider: str, key: str) -> str:
    """A shard's key within the checkpoint: the provider's name, then the key."""
    name = keys.component(provider)
    return f"{name}/{key}" if key else name
