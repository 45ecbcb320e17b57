"""The description of a state: :class:`Shard`, :class:`Buffer`, and references to arrays inside objects."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from datastates._base.columns import I64, U64
from datastates.state import dtypes, keys
from datastates.state.parts import Part


@dataclass(slots=True, eq=False)
class ArrayLeaf:
    """An array inside an object that is being written.

    Attributes:
        key: The key, within the provider, of the array shard that holds the array.
        requires_grad: torch's flag.
        parameter: Whether the array is a ``torch.nn.Parameter``.
        kind: The array's class if it is a subclass of tensors, else None.
        attributes: The attributes that were set on the array; None for none.
        storage: For the bytes of a torch storage, the name of the storage's class; None for other arrays.
    """

    key: str
    requires_grad: bool = False
    parameter: bool = False
    kind: Any = None
    attributes: Any = None
    storage: str | None = None


@dataclass(frozen=True, slots=True)
class StoredArray:
    """The place of an array's elements in the container, as written in ``data.pkl``.

    Attributes:
        record: Name of the storage record (the part after ``data/``).
        dtype: Name of the element type.
        offset: Elements from the beginning of the record to the array's first element.
        shape: Elements along each dimension.
        stride: Elements to step along each dimension.
        elements: Number of elements of that type in the whole record.
        requires_grad: torch's flag.
    """

    record: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    elements: int
    requires_grad: bool = False

    @classmethod
    def within(
        cls, record: int, nbytes: int, dtype: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> StoredArray:
        """Describe an array that begins ``offset`` bytes into the record number ``record``, which has ``nbytes``."""
        itemsize = dtypes.BY_NAME[dtype].itemsize
        return cls(str(record), dtype, offset // itemsize, shape, stride, nbytes // itemsize)

    @property
    def begin(self) -> int:
        """Bytes from the beginning of the record to the array's first element."""
        return self.offset * dtypes.BY_NAME[self.dtype].itemsize


HOST = -1
"""The device number of host memory; GPUs count from 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A range of memory, which one record of the container stores. Shards that share a buffer share its record.

    Attributes:
        pointer: Address of the first byte, on the host or on the device.
        nbytes: Length in bytes.
        device: CUDA device number, or :data:`HOST`.
        stream: Handle of the CUDA stream on which the contents were written; 0 is the legacy default stream. Copies
            wait for the work enqueued there. Unused for host memory.
        owner: An object that keeps the memory alive. A snapshot holds it until the memory is captured.
    """

    pointer: int
    nbytes: int
    device: int = HOST
    stream: int = 0
    owner: object = field(default=None, repr=False)

    @property
    def flaw(self) -> str | None:
        """The fault of the buffer, as the end of a message about a key; None if it has none."""
        return "has no memory: its storage was freed" if self.nbytes and not self.pointer else None


EVERY_RANK = (-1,)
"""Stands in :attr:`Shard.replicas` for all ranks that save together. A provider need not know their numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One piece of the state: an array, a part of an array, or an object that must be serialized.

    An array shard lies in ``buffer`` at ``buffer_offset``, with ``shape`` and ``stride``. It is a part of its logical
    tensor, which has the shape ``global_shape``. The part is a box or a flat range. A box begins at the index
    ``offset``; the whole tensor is a box at zeros. A flat range is the elements ``flat[0]`` to ``flat[1]`` of the
    row-major flattened tensor, as in ZeRO partitions; its ``shape`` is one-dimensional. Exactly one of ``offset`` and
    ``flat`` is None. An object shard needs ``key``, ``lazy`` and ``source`` only; see :func:`object_shard`.

    Attributes:
        key: Name within the provider, unique there but for parts of one tensor. It is a path of components joined by
            ``/``, see :func:`datastates.state.keys.join`. ``load()`` nests values by it, errors name it, and a restore
            finds the contents by it on any number of ranks. It must therefore be the same at each snapshot and on each
            rank. The empty key of an object shard means that the object is the provider's whole value.
        dtype: A name of :data:`datastates.state.dtypes.BY_NAME`; None for an object.
        kind: The array's library: ``"torch"``, ``"numpy"``, ``"cupy"`` or ``"jax"``; ``"object"`` for an object.
        shape: Shape of this part, in elements.
        stride: Elements to step along each dimension; never negative.
        global_shape: Shape of the logical tensor, in elements.
        offset: Index in the logical tensor at which the box begins; None for a flat range.
        flat: First and one past the last element of a flat range; None for a box.
        replicas: The ranks that hold the same part, ascending, with this rank among them. One of them writes the part.
            Empty if no other rank holds it; :data:`EVERY_RANK` if all ranks that save together hold it.
        owner: The rank of ``replicas`` that writes the part. None: the lowest rank writes a shard that is not lazy,
            because ranks may have changed it differently; the ranks share out lazy shards among them.
        compared: Whether a snapshot fails if the ranks of ``replicas`` hold different bytes. False: what the writing
            rank holds is right for all.
        lazy: True if the shard stays unchanged until ``Snapshot.captured``. False if it may change at any time, for
            example in the forward pass; ``snapshot()`` then copies it before it returns.
        buffer: The memory that holds the array; None for an object.
        buffer_offset: Bytes from the beginning of the buffer to the first element, a multiple of the element size.
        source: The live array or object.
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
    owner: int | None = None
    compared: bool = True
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
        """Bytes of the elements; None for an object, whose size is known only after it has been serialized."""
        return None if self.dtype is None else math.prod(self.shape) * dtypes.BY_NAME[self.dtype].itemsize


class Described(Sequence[Shard], ABC):
    """A sequence of shards: array shards, each made when its item is read, and object shards after them."""

    def __init__(self, count: int, objects: Sequence[Shard]) -> None:
        """Keep the object shards; ``count`` is the number of arrays."""
        self.objects = objects
        self._count = count

    @property
    @abstractmethod
    def keys(self) -> Sequence[str]:
        """The keys of the array shards."""

    @abstractmethod
    def array(self, i: int) -> Shard:
        """Make the array shard number ``i``, from 0."""

    def __len__(self) -> int:
        return self._count + len(self.objects)

    @overload
    def __getitem__(self, i: int) -> Shard: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Shard]: ...
    def __getitem__(self, i: int | slice) -> Shard | Sequence[Shard]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        return self.array(i) if i < self._count else self.objects[i - self._count]


def keys_of(shards: Sequence[Shard]) -> Sequence[str]:
    """The keys of the array shards in a sequence of shards."""
    return shards.keys if isinstance(shards, Described) else [shard.key for shard in shards if not shard.is_object]


def objects_of(shards: Sequence[Shard]) -> Sequence[Shard]:
    """The object shards in a sequence of shards."""
    return shards.objects if isinstance(shards, Described) else [shard for shard in shards if shard.is_object]


class Shards(Described):
    """Array shards, whose layout is kept apart from the live arrays, then object shards.

    A provider that returns the same ``layout`` object again states that only the contents of its arrays have changed:
    no key, type, shape, address or stream. The next snapshot then skips the inspection of the arrays. With
    ``addresses``, the addresses may have changed, too.

    Attributes:
        layout: The array shards without ``source``, and with buffers without ``owner``, so it keeps no memory alive.
        sources: The live array of each array shard.
        versions: torch's version counter of each array's changes in place; -1 for an array without a counter.
        memory: Objects that keep the memory of all arrays alive, even if an array is given other memory. None if the
            snapshot is to ask the arrays for them.
        addresses: The address at which each array, and its buffer, begins now. ``memory`` then has an object for each
            array. None if the arrays are where the layout says.
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
        addresses: U64 | None = None,
    ) -> None:
        """Put the attributes together; ``layout``, ``sources`` and ``versions`` have the same length."""
        super().__init__(len(layout), objects)
        self.layout = layout
        self.sources = sources
        self.versions = versions
        self.memory = memory
        self.addresses = addresses

    def but(self, *, layout: tuple[Shard, ...] | None = None, objects: Sequence[Shard] | None = None) -> Shards:
        """The same arrays with another layout, or beside other objects."""
        return Shards(
            self.layout if layout is None else layout,
            self.sources,
            self.objects if objects is None else objects,
            versions=self.versions,
            memory=self.memory,
            addresses=self.addresses,
        )

    @property
    def keys(self) -> Sequence[str]:
        """The keys of the array shards."""
        return [shard.key for shard in self.layout]

    def placed(self, i: int) -> Shard:
        """The array shard number ``i`` with its present address, without its live array."""
        shard = self.layout[i]
        if self.addresses is None:
            return shard
        return replace(shard, buffer=shard.buffer and replace(shard.buffer, pointer=int(self.addresses[i])))

    def array(self, i: int) -> Shard:
        """The array shard number ``i`` with its present address and its live array."""
        shard, source = self.placed(i), self.sources[i]
        owner = self.memory[i] if self.addresses is not None and self.memory is not None else source
        return replace(shard, source=source, buffer=shard.buffer and replace(shard.buffer, owner=owner))


def object_shard(key: str = "", *, lazy: bool = False, source: object = None) -> Shard:
    """Describe an object that :meth:`StateProvider.serialize` turns into bytes.

    Args:
        key: Key of the object within the provider; the empty key means that it is the provider's whole value.
        lazy: False to serialize it inside ``snapshot()``; True to do so in the background, before the gate opens.
        source: The live object, for use by the provider.
    """
    return Shard(key=key, dtype=None, kind="object", lazy=lazy, source=source)


@dataclass(slots=True, unsafe_hash=True)  # a frozen one takes several times as long to make, and there may be 10^5
class ArrayRef:
    """An array as a checkpoint describes it, before it has been read. Never changed.

    Attributes:
        key: The stored shard's key within its provider. Where several shards are the same memory, one of their keys.
        kind: The library that saved the array: ``"torch"``, ``"numpy"``, ``"cupy"`` or ``"jax"``.
        dtype: Name of its element type.
        shape: Elements along each dimension.
        stride: Elements to step along each dimension.
        requires_grad: torch's flag; False for other kinds.
        parameter: Whether the array is a ``torch.nn.Parameter`` in the object that refers to it.
    """

    key: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    parameter: bool = False

    def as_parameter(self, requires_grad: bool) -> ArrayRef:
        """Describe the same array as a ``torch.nn.Parameter``."""
        return replace(self, requires_grad=requires_grad, parameter=True)


def full_key(provider: str, key: str) -> str:
    """A shard's key within the checkpoint: the escaped name of the provider, ``/``, and the shard's key."""
    name = keys.component(provider)
    return f"{name}/{key}" if key else name
