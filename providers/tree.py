"""Nested containers as shards: every array a shard of its own, everything else one object that refers to them."""

from __future__ import annotations

import io
import pickle
import sys
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from datastates import arrays, dtensors
from datastates.describing import Describer
from datastates.errors import ProviderError
from datastates.keys import join
from datastates.pickling import PROTOCOL, ArrayLeaf, StoredArray, dumps
from datastates.protocol import Encoder, Saved, Shard, Shards, StateProvider, object_shard
from datastates.providers.by_key import ByKey
from datastates.providers.skeleton import Skeleton, attributes_of

Lazy = Callable[[str, object], bool]
"""Says of an array, by its key, whether it stays unchanged until the snapshot is captured."""

_INNER = "~5"
"""Begins the keys of arrays inside objects of other classes; no path component begins so."""

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes)


class _Opaque:
    """Stands in a frozen tree for the i-th object that was copied by pickling it."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True)
class Call:
    """Stands in a frozen tree for an object that is made by calling a function: it pickles as that call."""

    function: Any
    arguments: Any

    def __reduce__(self) -> tuple[Any, Any]:
        return self.function, self.arguments


@dataclass
class Tree:
    """A value taken apart: its arrays as shards, and a frozen copy of all the rest.

    Attributes:
        shards: The arrays.
        root: The containers, copied, with an :class:`~datastates.pickling.ArrayLeaf` for each array.
    """

    shards: Sequence[Shard] = ()
    root: object = None
    _opaque: bytes = b""

    def thaws(self) -> bool:
        """Whether the copied objects can be built over stand-ins for the tensors in them."""
        try:
            self._thaw()
        except Exception:  # whatever the objects' own code makes of a stand-in
            return False
        return True

    def _thaw(self) -> list[object]:
        return _Thaw(io.BytesIO(self._opaque)).load() if self._opaque else []

    def encode(self, locate: Callable[[ArrayLeaf], StoredArray]) -> bytes:
        """Serialize the frozen copy; depends on live state no more."""
        return dumps(_fill(self.root, self._thaw(), {}), locate)


class _Freeze(pickle.Pickler):
    """Copies opaque objects at once; the tensors in them become shards like all others."""

    def __init__(self, file: io.BytesIO, leaf: Callable[[object], ArrayLeaf | None]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._leaf = leaf

    def persistent_id(self, obj: object) -> ArrayLeaf | None:
        return self._leaf(obj)


class _Thaw(pickle.Unpickler):
    """Reads back what :class:`_Freeze` wrote in this process."""

    def persistent_load(self, pid: Any) -> ArrayLeaf:
        return ArrayLeaf(pid.key, pid.requires_grad, pid.parameter)


@dataclass
class PlainTree:
    """A value of a known structure taken apart, with nothing in it but arrays and plain values.

    Attributes:
        skeleton: Its containers.
        requires_grad, parameter: What :class:`~datastates.pickling.ArrayLeaf` is to say of each array.
        plain: The plain values.
    """

    skeleton: Skeleton
    requires_grad: Sequence[bool]
    parameter: Sequence[bool]
    plain: Sequence[object]

    def encode(self, locate: Callable[[ArrayLeaf], StoredArray]) -> bytes:
        """Serialize all but the arrays; depends on live state no more."""
        leaves = list(map(ArrayLeaf, self.skeleton.keys, self.requires_grad, self.parameter))
        return dumps(self.skeleton.clothe(leaves, self.plain), locate)


def take_apart(value: object, lazy: Lazy, describer: Describer, *, detached: bool = False) -> Tree:
    """Walk nested dicts, lists and tuples; arrays become shards, everything else is copied now.

    Containers that occur twice, or in themselves, do so in the copy. Objects of other classes are copied by pickling
    them; torch tensors inside them become shards too, which are never lazy.

    Args:
        value: The value.
        lazy: Whether an array stays unchanged until the snapshot is captured.
        describer: Describes the arrays.
        detached: Store parameters as plain tensors, as ``state_dict()`` gives them.

    Raises:
        ProviderError: An object does not pickle; the message names its key.
    """
    tree = Tree()
    found: list[tuple[str, object, bool]] = []
    opaque: list[object] = []
    opaque_keys: list[str] = []
    copies: dict[int, object] = {}
    open_tuples: set[int] = set()

    def leaf(key: str, array: Any, is_lazy: bool) -> ArrayLeaf:
        found.append((key, array, is_lazy))
        return _leaf(key, array, detached)

    def walk(item: Any, key: str) -> object:
        if type(item) in _IMMUTABLE:
            return item
        if id(item) in copies:
            return copies[id(item)]
        if arrays.kind_of(item) is not None:
            return leaf(key, item, lazy(key, item))
        if type(item) in (dict, OrderedDict):
            mapping = copies[id(item)] = type(item)()
            for k, v in item.items():
                mapping[k] = walk(v, join(key, k))
            if attributes := attributes_of(item):
                inner_key = f"{_INNER}{len(found)}"
                vars(mapping).update((k, walk(v, join(inner_key, k))) for k, v in attributes.items())
            return mapping
        if type(item) is list:
            sequence: list[object] = []
            copies[id(item)] = sequence
            sequence.extend(walk(v, join(key, i)) for i, v in enumerate(item))
            return sequence
        if _is_tuple(item) and id(item) not in open_tuples:
            open_tuples.add(id(item))
            parts = [walk(v, join(key, i)) for i, v in enumerate(item)]
            open_tuples.remove(id(item))
            return tuple.__new__(type(item), parts)
        if is_plain(item):
            return item
        if _is_tensor(item):  # sparse, meta and the like: torch says which plain tensors they are made of
            inner_key = f"{_INNER}{len(found)}"
            return Call(*(walk(part, join(inner_key, i)) for i, part in enumerate(item.__reduce_ex__(PROTOCOL)[:2])))
        opaque.append(item)
        opaque_keys.append(key)
        return _Opaque(len(opaque) - 1)

    def inner(item: object) -> ArrayLeaf | None:
        if arrays.kind_of(item) != "torch":
            return None
        if dtensors.is_dtensor(item):  # it could come back as a whole tensor only
            raise ProviderError("it holds a DTensor, which has its place in plain dicts, lists and tuples")
        return leaf(f"{_INNER}{len(found)}", item, False)

    tree.root = walk(value, "")
    if opaque:
        outer = len(found)
        tree._opaque = _freeze(opaque, opaque_keys, inner)
        if len(found) > outer and not tree.thaws():
            # their own code wants real tensors to build them: then the tensors are pickled with them
            del found[outer:]
            tree._opaque = _freeze(opaque, opaque_keys, lambda _: None)
    tree.shards = describer.describe([k for k, _, _ in found], [a for _, a, _ in found], [z for _, _, z in found])
    return tree


def _leaf(key: str, array: object, detached: bool) -> ArrayLeaf:
    if detached:
        return ArrayLeaf(key)
    return ArrayLeaf(key, bool(getattr(array, "requires_grad", False)), arrays.is_parameter(array))


def _freeze(objects: list[object], keys: list[str], leaf: Callable[[object], ArrayLeaf | None]) -> bytes:
    file = io.BytesIO()
    try:
        _Freeze(file, leaf).dump(objects)
    except Exception as error:
        for key, item in zip(keys, objects, strict=True):
            try:
                _Freeze(io.BytesIO(), leaf).dump(item)
            except Exception as cause:  # whatever the object's own code raises
                raise ProviderError(f"{key!r} ({type(item).__name__}) cannot be pickled: {cause}") from cause
        raise ProviderError(f"{', '.join(map(repr, keys))} cannot be pickled together: {error}") from error
    return file.getvalue()


def _is_tuple(item: object) -> bool:
    return type(item) is tuple or (isinstance(item, tuple) and hasattr(item, "_fields"))


def _is_tensor(item: object) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(item, torch.Tensor)


def is_plain(item: object) -> bool:
    """Whether a value is immutable and no container: it needs no copy."""
    if type(item) in _IMMUTABLE:
        return True
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(item, (torch.Size, torch.dtype, torch.device, torch.layout)):
        return True
    return isinstance(item, np.generic) and not isinstance(item, (np.object_, np.void))


def _fill(item: Any, objects: list[object], seen: dict[int, object]) -> object:
    """Put the copied objects where their stand-ins are; containers keep their identity."""
    if type(item) is _Opaque:
        return objects[item.number]
    if id(item) in seen:
        return seen[id(item)]
    if type(item) in (dict, OrderedDict):
        seen[id(item)] = item
        for k, v in item.items():
            item[k] = _fill(v, objects, seen)
        for k, v in attributes_of(item).items():
            setattr(item, k, _fill(v, objects, seen))
    elif type(item) is list:
        seen[id(item)] = item
        item[:] = [_fill(v, objects, seen) for v in item]
    elif _is_tuple(item):
        return tuple.__new__(type(item), [_fill(v, objects, seen) for v in item])
    elif type(item) is Call:
        return Call(_fill(item.function, objects, seen), _fill(item.arguments, objects, seen))
    return item


def is_inner(key: str) -> bool:
    """Whether a key is that of an array inside an object of another class."""
    return key.startswith(_INNER)


def _with(shards: Sequence[Shard], rest: object) -> Sequence[Shard]:
    """Array shards, and the object that holds all the rest."""
    objects = [object_shard(source=rest)]
    if isinstance(shards, Shards):
        return Shards(shards.layout, shards.sources, objects, versions=shards.versions, memory=shards.memory)
    return [*shards, *objects]


class TreeProvider(StateProvider):
    """A provider whose state is one nested value; subclasses say where it comes from and goes to."""

    def __init__(self, name: str) -> None:
        """Nothing is known of the value yet."""
        super().__init__(name)
        self._describer = Describer()
        self._skeleton: Skeleton | None = None
        self._lazy_flags: list[bool] = []
        self._parameter_flags: list[bool] = []

    @abstractmethod
    def value(self) -> object:
        """The live state."""

    @abstractmethod
    def is_lazy(self, key: str, array: object) -> bool:
        """Whether an array of the live state stays unchanged until the snapshot is captured."""

    def _current(self) -> tuple[object, bool]:
        """The value to save, and whether its parameters are to be stored as plain tensors."""
        return self.value(), False

    @abstractmethod
    def match(self, stored: object, saved: Saved) -> Sequence[tuple[str, object]]:
        """The arrays to restore into, with their keys, given the stored value with an ArrayRef for each array.

        Reports what differs.
        """

    def shards(self) -> Sequence[Shard]:
        """Take the live value apart: its arrays, then the object that holds all the rest."""
        value, detached = self._current()
        again = self._again(value, detached)
        if again is not None:
            return again
        self._skeleton = Skeleton.of(value, is_plain)
        stripped = None if self._skeleton is None else self._skeleton.strip(value)
        if self._skeleton is None or stripped is None:
            tree = take_apart(value, self.is_lazy, self._describer, detached=detached)
            return _with(tree.shards, tree)
        keys, (values, plain) = self._skeleton.keys, stripped
        self._lazy_flags = list(map(self.is_lazy, keys, values))
        self._parameter_flags = [not detached and arrays.is_parameter(array) for array in values]
        shards = self._describer.describe(keys, values, self._lazy_flags)
        requires_grad = [not detached and bool(getattr(array, "requires_grad", False)) for array in values]
        return _with(shards, PlainTree(self._skeleton, requires_grad, self._parameter_flags, plain))

    def _again(self, value: object, detached: bool) -> Sequence[Shard] | None:
        """The shards of a value whose structure and memory are those of the last time; None for others."""
        stripped = None if self._skeleton is None else self._skeleton.strip(value)
        if self._skeleton is None or stripped is None:
            return None
        keys, (values, plain) = self._skeleton.keys, stripped
        shards = self._describer.again(keys, values, self._lazy_again(keys, values))
        if shards is None:
            return None
        requires_grad = [False] * len(keys) if detached else list(map(attrgetter("requires_grad"), values))
        return _with(shards, PlainTree(self._skeleton, requires_grad, self._parameter_flags, plain))

    def _lazy_again(self, keys: Sequence[str], values: Sequence[object]) -> list[bool]:
        """What :meth:`is_lazy` says of arrays whose keys and types are those of the last time."""
        del keys, values
        return self._lazy_flags

    def serialize(self, shard: Shard) -> Encoder:
        """The rest was copied by :meth:`shards`; encoding it is left to the background."""
        assert isinstance(shard.source, (Tree, PlainTree))
        return shard.source.encode

    def destinations(self, saved: Saved) -> Sequence[Shard]:
        """What the live state and the stored one have in common, and whatever else the subclass wants."""
        by_key = None if "" in saved.objects() else ByKey.of(saved)
        if by_key is None and "" not in saved.objects():
            saved.report(mismatched={"": "was not saved as a nested value"})
            return []
        found = self.match(saved.structure("") if by_key is None else by_key.value, saved)
        rest = object_shard()
        if by_key is not None:
            by_key.targets = dict(found)
            rest = object_shard(by_key.key, source=by_key)
        return arrays.Destinations([key for key, _ in found], [array for _, array in found], [rest])

    @staticmethod
    def listed(saved: Saved) -> Collection[str]:
        """Keys of the arrays in the stored value, and of those that share memory with one."""
        return saved.arrays() if "" in saved.objects() else saved.every_key()

    def restore(self, shard: Shard, value: object) -> None:
        """Take back the whole value, in which the arrays have been restored."""
        self.accept(shard.source.assemble(value) if isinstance(shard.source, ByKey) else value)

    @abstractmethod
    def accept(self, value: Any) -> None:
        """Take back what is not in place by now."""
