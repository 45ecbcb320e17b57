"""The vocabulary between state providers and the engine: :class:`StateProvider`, :class:`Shard`, :class:`Buffer`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, overload

from datastates import dtypes, keys
from datastates.parts import Part
from datastates.pickling import ArrayLeaf, StoredArray
from datastates.plan import I64

HOST = -1
"""The device number of host memory; GPUs count from 0."""


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a strided array's first to one past its last; 0 when it has none."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their span exactly, each once (a permutation of a contiguous array)."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return 0 in shape
        expected *= size
    return True


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
            name, of components joined by ``/`` (:func:`datastates.keys.join` makes one): what ``load()`` nests by,
            what errors name, and what a restore finds the contents by, on any number of ranks. So it is the same at
            each snapshot and on each rank. Of an object shard, the empty key means: the provider's whole value.
        dtype: A name out of :data:`datastates.dtypes.BY_NAME`; None for an object.
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


Encoder: TypeAlias = Callable[[Callable[[ArrayLeaf], StoredArray]], bytes]
"""Finishes a serialization, given where the provider's array shards are stored."""


class Saved(ABC):
    """What a checkpoint holds for one provider; handed to :meth:`StateProvider.destinations`."""

    strict: bool
    """Whether the caller wants every difference refused; the engine does that, from what is reported."""

    @abstractmethod
    def arrays(self) -> Mapping[str, ArrayRef]:
        """The stored arrays by their key within the provider, each a logical tensor.

        Of a checkpoint of several ranks, those are listed that the rank of this number had; all others are found by
        their keys as well.
        """

    @abstractmethod
    def every_key(self) -> Sequence[str]:
        """Keys of all stored arrays, whichever rank had them. Of many ranks this takes long."""

    @abstractmethod
    def objects(self) -> Sequence[str]:
        """Keys of the stored objects."""

    @abstractmethod
    def report(
        self,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, str] | None = None,
    ) -> None:
        """Say, by key, what only the live state has, what only the checkpoint has, and what differs and how."""

    @abstractmethod
    def structure(self, key: str) -> object:
        """A stored object's containers and plain values, with an :class:`ArrayRef` for each array.

        An object of another class is left unbuilt: :class:`datastates.unpickling.Unbuilt` stands for it.

        Raises:
            TrustError: It needs a class that the caller has not trusted.
            CorruptError: Its bytes do not match their checksum.
        """


class StateProvider(ABC):
    """One piece of training state: what to keep, and how to take it back.

    Subclass it, name your shards in :meth:`shards`, and handle your objects in :meth:`serialize` and :meth:`restore`;
    ``datastates.testing.ProviderTests`` checks a subclass. All methods are called on the thread that calls
    ``snapshot()`` or ``restore()``, but :meth:`serialize` of a lazy object shard, and the callable that
    :meth:`serialize` may return, run on the engine's own thread.
    """

    per_rank: bool = False
    """Whether the state belongs to the rank rather than to the model: each rank's is kept apart, under its number."""

    def __init__(self, name: str) -> None:
        """Name the provider; names are unique within a checkpoint and become the top-level keys of its ``data.pkl``."""
        if not isinstance(name, str):
            raise TypeError(f"a provider's name is a string, not {type(name).__name__}")
        self.name = name

    @abstractmethod
    def shards(self) -> Sequence[Shard]:
        """Describe the state and copy nothing: sources on save, destinations on restore.

        Each Shard names its key, dtype, global shape, this process's part of it, and nbytes (None: known only
        after serializing).
        REQUIRES on save: a shard marked lazy stays unchanged until Snapshot.captured.
        """

    def knowledge(self) -> object:
        """What :meth:`shards` has found out about the form of the state, for :meth:`learn`; None for nothing.

        The engine keeps it from one snapshot to the next, so it holds no arrays and nothing that holds them.
        """
        return None

    def learn(self, knowledge: object) -> None:
        """Take the :meth:`knowledge` of the provider that had this class and name in the last snapshot.

        It spares a new provider object the work of describing a known state. The state may be another one: what was
        learned is compared with the state before it is used. Called before :meth:`shards`, on a provider that knows
        nothing yet.
        """
        del knowledge

    def serialize(self, shard: Shard) -> bytes | Encoder:
        """Serialize one object shard with :func:`datastates.dumps`.

        Called inside ``snapshot()``, or in the background when the shard is lazy. What is expensive and no longer
        depends on live state may be left to a returned callable, which runs in the background; it is given a function
        that says where an array shard of this provider is stored, for objects that refer to arrays.
        """
        raise NotImplementedError(f"{type(self).__name__} has object shards but no serialize()")

    def destinations(self, saved: Saved) -> Sequence[Shard]:
        """The shards to restore into, in sight of what the checkpoint holds; by default those of :meth:`shards`.

        Override it where the state decides by what was saved (an optimizer that has no state yet). Differences are
        reported to ``saved``, and only shards that it holds are returned; shapes and dtypes are compared by the engine.
        """
        shards = self.shards()
        known = {*saved.arrays(), *saved.objects()}
        wanted = [shard.key for shard in shards]
        saved.report(missing=[k for k in wanted if k not in known], unexpected=sorted(known.difference(wanted)))
        return [shard for shard in shards if shard.key in known]

    def restore(self, shard: Shard, value: object) -> None:
        """Take one object shard back; arrays are in place by then.

        ``shard`` is the one that :meth:`destinations` gave; ``value`` what :func:`datastates.dumps` was given in
        :meth:`serialize`.
        """
        raise NotImplementedError(f"{type(self).__name__} has object shards but no restore()")


def full_key(provider: str, key: str) -> str:
    """A shard's key within the checkpoint: the provider's name, then the key."""
    name = keys.component(provider)
    return f"{name}/{key}" if key else name


def walk_unique(providers: Sequence[StateProvider]) -> Iterator[StateProvider]:
    """The providers, each checked to be one and to have a name of its own; raises TypeError or ValueError."""
    seen: set[str] = set()
    if isinstance(providers, (Mapping, str, StateProvider)) or not isinstance(providers, Iterable):
        raise TypeError(f"providers: a list of StateProviders is wanted, not a {type(providers).__name__}")
    for provider in providers:
        if not isinstance(provider, StateProvider) or not hasattr(provider, "name"):
            raise TypeError(
                f"providers: a {type(provider).__name__} is no StateProvider with a name; "
                "wrap state by from_stateful(name, obj) or from_state_dict(name, mapping)"
            )
        if provider.name in seen:
            raise ValueError(f"two providers are named {provider.name!r}")
        seen.add(provider.name)
        yield provider
