"""Takes nested values apart: into arrays, and a frozen copy of the rest that refers to the arrays."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from datastates._base import log
from datastates._base.loaded import loaded
from datastates.container.pickle_needs import needs_trust
from datastates.container.pickle_torch import is_generator
from datastates.container.pickle_writer import PROTOCOL, dumps
from datastates.errors import ProviderError
from datastates.providers.nested.freezing import Copies, vet
from datastates.providers.nested.skeleton import Skeleton, attributes_of, is_plain_key
from datastates.state import arrays, dtensors, laziness, sharded_tensors, storages, subclasses
from datastates.state.depth import DEEPEST, deeper
from datastates.state.keys import INNER, component, is_inner, is_of_rank, join, of_rank, of_tensor
from datastates.state.known_layout import Describer
from datastates.state.shards import ArrayLeaf, Shard, StoredArray

_told: set[tuple[str, str]] = set()
"""Pairs of provider and class for which it was logged that a load needs trust. Each is logged once in a process."""

Lazy = Callable[[str, object], bool]
"""A function of an array's key and the array: whether the array stays unchanged until the snapshot is captured."""

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes)


class _Opaque:
    """Stands in a frozen tree for an object that was copied by pickling. ``number`` counts the pickled objects."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(eq=False)
class Call:
    """Stands in a frozen tree for an object, and pickles as the function call that makes the object."""

    function: Any
    arguments: Any
    state: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments, self.state


@dataclass
class Tree:
    """A value split into its arrays, as shards, and a frozen copy of the rest.

    Attributes:
        shards: The arrays as shards.
        root: The copied containers, with an :class:`~datastates.state.shards.ArrayLeaf` for each array.
        name: The provider's name, for messages.
    """

    shards: Sequence[Shard] = ()
    root: object = None
    name: str = ""
    _objects: Copies = field(default_factory=Copies)

    def encode(self, locate: Callable[[ArrayLeaf], StoredArray]) -> bytes:
        """Serialize the frozen copy, independently of live state."""
        names: set[str] = set()
        with deeper():
            root = _fill(self.root, self._objects.objects, {})
            data = dumps(root, locate, names, self._objects.leaf_of)
        needed = [name for name in needs_trust(names) if (self.name, name) not in _told]
        if needed:
            _told.update((self.name, name) for name in needed)
            log.warning("%r is saved with objects that are read back with trust=%s only", self.name, needed)
        return data


@dataclass
class PlainTree:
    """A value split by a known skeleton, without its arrays.

    Attributes:
        skeleton: The containers.
        requires_grad, parameter: For each array, the fields of these names of its
            :class:`~datastates.state.shards.ArrayLeaf`.
        plain: The plain values.
        attributes: For each array, its Python attributes; None if no array has any.
        tied: For each array that is the same object as an earlier array: its number, and the number of the first one.
    """

    skeleton: Skeleton
    requires_grad: Sequence[bool]
    parameter: Sequence[bool]
    plain: Sequence[object]
    attributes: Sequence[dict[str, Any]] | None = None
    tied: Sequence[tuple[int, int]] = ()

    def encode(self, locate: Callable[[ArrayLeaf], StoredArray]) -> bytes:
        """Serialize everything but the arrays, independently of live state."""
        leaves = list(map(ArrayLeaf, self.skeleton.keys, self.requires_grad, self.parameter))
        for leaf, attributes in zip(leaves, self.attributes or (), strict=False):
            leaf.attributes = attributes
        for again, first in self.tied:
            leaves[again] = leaves[first]
        with deeper():
            return dumps(self.skeleton.clothe(leaves, self.plain), locate)


def take_apart(value: object, lazy: Lazy, describer: Describer, *, detached: bool = False) -> Tree:
    """Walk nested dicts, lists and tuples: arrays become shards, everything else is copied now.

    The copy has the same shared and cyclic containers as the value. Objects of other classes are copied by pickling
    them. Torch tensors inside these objects become shards, too, and are never lazy.

    Args:
        value: The value.
        lazy: Tells whether an array stays unchanged until the snapshot is captured.
        describer: Describes the arrays.
        detached: Store parameters as plain tensors, as ``state_dict()`` returns them.

    Raises:
        ProviderError: An object does not pickle, or a container is nested too deep; the message names its key.
    """
    walk = _Walk(lazy, detached)
    tree = Tree(root=walk.copy(value, ""))
    if walk.opaque:
        tree._objects = Copies.of(walk.opaque, walk.opaque_keys, walk.inner, walk.found)
    found = walk.found
    tree.shards = describer.describe([k for k, _, _ in found], [a for _, a, _ in found], [lazy for _, _, lazy in found])
    if walk.composed:
        tree.shards = _beside(tree.shards, walk.composed)
    if walk.boxes:
        tree.shards = [*tree.shards, *walk.boxes]
    return tree


def _beside(shards: Sequence[Shard], composed: Sequence[object]) -> list[Shard]:
    """Describe arrays beside DTensors whose local tensors consist of others: the ranks of all DTensors hold them.

    Only this rank holds the arrays inside these local tensors.
    """
    meshes = dtensors.Meshes([*(shard.source for shard in shards), *composed])
    placed = []
    for shard in shards:
        if not is_of_rank(shard.key):
            part = meshes.part(shard.key, shard.source, shard.shape)
            shard = replace(shard, replicas=part.replicas, owner=part.owner)
        else:
            shard = replace(shard, replicas=(), owner=None)
        placed.append(shard)
    return placed


class _Walk:
    """One walk through a nested value, which copies its containers.

    Attributes:
        found: The arrays: key, array, and whether it is lazy.
        opaque, opaque_keys: The objects to pickle, and their keys for messages.
        composed: The DTensors whose local tensors consist of others.
        boxes: The shards of ShardedTensors.
    """

    def __init__(self, lazy: Lazy, detached: bool) -> None:
        self.found: list[tuple[str, Any, bool]] = []
        self.opaque: list[object] = []
        self.opaque_keys: list[str] = []
        self.composed: list[object] = []
        self.boxes: list[Shard] = []
        self._lazy = lazy
        self._detached = detached
        self._outer: dict[str, str] = {}  # by the key of an array inside an object: the object's key
        self._number = -1  # number in the last key inside an object
        self._depth = 0
        self._copies: dict[int, tuple[object, Any]] = {}  # with each value, as the id of a freed one may be used again
        self._leaves: dict[int, ArrayLeaf] = {}
        self._open_tuples: set[int] = set()

    def copy(self, item: Any, key: str) -> object:
        """Make the frozen copy of a value; raises ProviderError if it is nested too deep."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise ProviderError(f"{self._shown(key)[:80]!r}... is nested more than {DEEPEST} levels deep")
        copy = self._copy(item, key)
        self._depth -= 1
        return copy

    def inner(self, item: object) -> ArrayLeaf | None:
        """Make the leaf for a torch tensor or storage inside an object that is pickled; None for any other value."""
        if storages.is_storage(item):
            return self._storage(item, self._inside(""))
        if arrays.kind_of(item) != "torch":
            return None
        if dtensors.is_dtensor(item):  # a restore would make a plain tensor of it
            raise ProviderError("it holds a DTensor: keep DTensors in plain dicts, lists and tuples")
        made = self._leaf(self._inside(""), item, False)
        made.attributes = None if self._detached else next(iter(subclasses.attributes_of([item]) or ()), None)
        return made

    def _copy(self, item: Any, key: str) -> object:
        if type(item) in _IMMUTABLE:
            return item
        if (known := self._copies.get(id(item))) is not None:
            return known[1]
        if arrays.kind_of(item) is not None:
            return self._array(item, key)
        if type(item) in (dict, OrderedDict):
            return self._mapping(item, key)
        if type(item) is list:
            sequence: list[object] = []
            self._copies[id(item)] = item, sequence
            for i, v in enumerate(item):  # a generator would recurse in C, which CPython 3.12 limits
                sequence.append(self.copy(v, join(key, i)))
            return sequence
        if _is_tuple(item) and id(item) not in self._open_tuples:
            return self._tuple(item, key)
        if is_plain(item):
            return item
        if dtensors.is_dtensor(item):
            return self._composed(item, key)
        if sharded_tensors.is_sharded(item):
            self.boxes += sharded_tensors.shards_of(key, item, partial(self._lazy, key))
            self._copies[id(item)] = item, ArrayLeaf(key)
            return self._copies[id(item)][1]
        if subclasses.is_tensor(item):  # sparse, meta and the like
            return self._odd_tensor(item, key)
        if storages.is_storage(item):
            return self._storage(item, key)
        if is_generator(item):  # its state is an array
            return self._call(item, item.__reduce__(), self._named(key))
        self.opaque.append(item)
        self.opaque_keys.append(self._shown(key))
        return _Opaque(len(self.opaque) - 1)

    def _array(self, item: Any, key: str) -> ArrayLeaf:
        if not self._detached and (beside := subclasses.attributes_of([item])):
            return self._dressed(key, item, None, *beside)
        found = self._leaf(key, item, self._lazy(key, item))
        is_apart = found.parameter or found.requires_grad
        return self._leaves.setdefault(id(item), found) if is_apart else found

    def _mapping(self, item: dict[Any, Any], key: str) -> dict[Any, object]:
        mapping = type(item)()
        self._copies[id(item)] = item, mapping
        for k, v in item.items():
            mapping[k] = self.copy(v, self._key_of(key, k))
        if attributes := attributes_of(item):
            inner_key = self._inside(key)
            vars(mapping).update((k, self.copy(v, join(inner_key, k))) for k, v in attributes.items())
        return mapping

    def _tuple(self, item: Any, key: str) -> object:
        if type(item) is not tuple:
            vet(self._shown(key), type(item))
        self._open_tuples.add(id(item))
        parts = [self.copy(v, join(key, i)) for i, v in enumerate(item)]
        self._open_tuples.remove(id(item))
        return tuple.__new__(type(item), parts)

    def _odd_tensor(self, item: Any, key: str) -> object:
        """Copy a tensor that cannot be stored as its memory: ``__reduce_ex__`` gives the plain tensors inside it."""
        inner_key = self._named(key)
        parts = item.__reduce_ex__(PROTOCOL)[:2]
        memory = subclasses.memory(parts)
        if memory is None:
            return self._call(item, parts, inner_key)
        leaf = self._dressed(inner_key, memory, parts[1][1], parts[1][3])
        self._copies[id(item)] = item, leaf
        return leaf

    def _composed(self, item: Any, key: str) -> object:
        """Copy a DTensor whose local tensor consists of others: the local tensor, under keys of this rank alone."""
        self.composed.append(item)
        local, shown = dtensors.local(item), self._shown(key)
        inner_key = of_rank(item.device_mesh.get_rank(), dtensors.box_of(shown, item), shown)
        self._outer[inner_key] = key
        call = self._call(local, local.__reduce_ex__(PROTOCOL)[:2], inner_key)
        self._copies[id(item)] = item, call
        return call

    def _named(self, key: str) -> str:
        """The key of the arrays inside a tensor, storage or generator. It does not depend on other state."""
        if is_inner(key):  # it is a part of such a tensor, or of an object
            return key
        self._outer[of_tensor(key)] = key
        return of_tensor(key)

    def _storage(self, item: object, key: str) -> ArrayLeaf:
        """Copy a torch storage as an array of its bytes."""
        found = self._leaf(self._named(key), storages.bytes_of(item), False)
        found.storage = storages.class_of(item)
        self._copies[id(item)] = item, found
        return found

    def _call(self, item: object, parts: tuple[Any, ...], inner_key: str) -> Call:
        """Copy an object as the function call that makes it. The attributes of a tensor are right below its key."""
        attributes = subclasses.attributes_in(parts)
        if attributes is not None:
            parts = parts[0], parts[1][:-1]
        call = Call(*(self.copy(part, join(inner_key, i)) for i, part in enumerate(parts)))
        if attributes is not None:
            call.arguments = (*call.arguments, self.copy(attributes, inner_key))
        self._copies[id(item)] = item, call
        return call

    def _dressed(self, key: str, array: Any, kind: Any, attributes: Any) -> ArrayLeaf:
        """Copy an array of a subclass, or an array with attributes, whose class or attributes are stored beside it."""
        made = self._leaf(key, array, kind is None and self._lazy(key, array))
        self._copies[id(array)] = array, made
        inner_key = self._inside(key)
        made.kind, made.attributes = self.copy(kind, inner_key), self.copy(attributes, inner_key)
        return made

    def _leaf(self, key: str, array: Any, is_lazy: bool) -> ArrayLeaf:
        self.found.append((key, array, is_lazy))
        if self._detached:
            return ArrayLeaf(key)
        return ArrayLeaf(key, bool(getattr(array, "requires_grad", False)), laziness.is_parameter(array))

    def _inside(self, key: str) -> str:
        """Make a new key for arrays inside the object with the key ``key``. The new key shows that key."""
        self._number = max(self._number + 1, len(self.found))
        outer = self._shown(key)
        inner_key = f"{INNER}{self._number}:{component(outer)}" if outer else f"{INNER}{self._number}"
        self._outer[inner_key] = key
        return inner_key

    def _shown(self, key: str) -> str:
        """A key as messages show it: with the key of the object instead of a key inside the object."""
        head, slash, rest = key.partition("/")
        return f"{self._shown(self._outer[head])}{slash}{rest}" if head in self._outer else key

    def _key_of(self, key: str, k: object) -> str:
        if not is_plain_key(k):
            vet(self._shown(key), {k: None})
        try:
            return join(key, k)
        except ValueError as error:  # an integer with too many digits
            raise ProviderError(f"{self._shown(key)!r} has a key without a name: {error}") from error


def tied(values: Sequence[object], apart: Sequence[bool]) -> list[tuple[int, int]]:
    """Numbers of values that occurred before, each with the number of the first occurrence.

    Only values marked in ``apart`` are compared: parameters and tensors that require gradients. Equal objects among the
    other values only share memory.
    """
    numbers = [i for i, is_apart in enumerate(apart) if is_apart]
    first: dict[int, int] = {}
    found = ((i, first.setdefault(id(values[i]), i)) for i in numbers)
    return [(i, number) for i, number in found if i != number]


def _is_tuple(item: object) -> bool:
    return type(item) is tuple or (isinstance(item, tuple) and hasattr(item, "_fields"))


def is_plain(item: object) -> bool:
    """Whether a value is immutable and no container. Such a value needs no copy."""
    if type(item) in _IMMUTABLE:
        return True
    torch = loaded("torch")
    if torch is not None and isinstance(item, (torch.Size, torch.dtype, torch.device, torch.layout)):
        return True
    return isinstance(item, np.generic) and not isinstance(item, (np.object_, np.void))


def _fill(item: Any, objects: list[object], seen: dict[int, object]) -> object:
    """Replace the stand-ins of copied objects by the objects; containers keep their identity."""
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
    elif type(item) is ArrayLeaf:
        seen[id(item)] = item
        item.kind, item.attributes = _fill(item.kind, objects, seen), _fill(item.attributes, objects, seen)
    elif type(item) is Call:
        seen[id(item)] = item
        parts = (item.function, item.arguments, item.state)
        item.function, item.arguments, item.state = (_fill(part, objects, seen) for part in parts)
    return item
