"""Splits a nested value into shards: one for each array, and one object for the rest, which refers to the arrays."""

from __future__ import annotations

import logging
import operator
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from datastates._base.loaded import loaded
from datastates.container.pickle_policy import is_generator
from datastates.container.pickle_reader import needs_trust
from datastates.container.pickle_writer import PROTOCOL, dumps
from datastates.errors import ProviderError
from datastates.providers.nested.freezing import freeze, thaw, vet
from datastates.providers.nested.skeleton import Skeleton, attributes_of, is_plain_key
from datastates.providers.nested.spelled_keys import ByKey
from datastates.state import arrays, dressed, dtensors
from datastates.state.depth import DEEPEST, deeper
from datastates.state.keys import join
from datastates.state.provider import Encoder, Saved, StateProvider
from datastates.state.repeated import Describer, Known
from datastates.state.shards import ArrayLeaf, Shard, Shards, StoredArray, object_shard

_log = logging.getLogger("datastates")
_told: set[tuple[str, str]] = set()
"""Provider and class of everything whose need of trust was logged: that is logged once in a process."""

Lazy = Callable[[str, object], bool]
"""Given an array and its key, whether the array stays unchanged until the snapshot is captured."""

_INNER = "~5"
"""Prefix of the keys of arrays inside objects of other classes; no path component begins with it."""

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes)


class _Opaque:
    """Stands in a frozen tree for an object that was copied by pickling it, by its number among those."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(eq=False)
class Call:
    """Stands in a frozen tree for an object that a function call makes; it pickles as that call."""

    function: Any
    arguments: Any
    state: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments, self.state


@dataclass
class Tree:
    """A value split into its arrays, as shards, and a frozen copy of the rest.

    Attributes:
        shards: The arrays.
        root: The copied containers, with an :class:`~datastates.state.shards.ArrayLeaf` for each array.
        name: The provider's name, for messages.
    """

    shards: Sequence[Shard] = ()
    root: object = None
    name: str = ""
    _opaque: bytes = b""

    def thaws(self) -> bool:
        """Whether the copied objects can be built with leaves in place of the tensors in them."""
        try:
            self._thaw()
        except Exception:  # the objects' own code may raise anything
            return False
        return True

    def _thaw(self) -> list[object]:
        return thaw(self._opaque) if self._opaque else []

    def encode(self, locate: Callable[[ArrayLeaf], StoredArray]) -> bytes:
        """Serialize the frozen copy, independently of live state."""
        names: set[str] = set()
        with deeper():
            data = dumps(_fill(self.root, self._thaw(), {}), locate, names)
        needed = [name for name in needs_trust(names) if (self.name, name) not in _told]
        if needed:
            _told.update((self.name, name) for name in needed)
            _log.warning("%r is saved with objects that are read back with trust=%s only", self.name, needed)
        return data


@dataclass
class PlainTree:
    """A value of arrays and plain values in known containers, split.

    Attributes:
        skeleton: The containers.
        requires_grad, parameter: For each array, those fields of its :class:`~datastates.state.shards.ArrayLeaf`.
        plain: The plain values.
        attributes: For each array, its Python attributes; None if no array has any.
        tied: For each array that is the same object as an earlier one: its number, and that of the first.
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
    them. Torch tensors inside those become shards, too, and are never lazy.

    Args:
        value: The value.
        lazy: Whether an array stays unchanged until the snapshot is captured.
        describer: Describes the arrays.
        detached: Store parameters as plain tensors, as ``state_dict()`` returns them.

    Raises:
        ProviderError: An object does not pickle, or a container is nested too deep; the message names its key.
    """
    tree = Tree()
    found: list[tuple[str, object, bool]] = []
    opaque: list[object] = []
    opaque_keys: list[str] = []
    outer: dict[str, str] = {}
    depth = 0
    copies: dict[int, object] = {}
    leaves: dict[int, ArrayLeaf] = {}
    made: list[object] = []  # keeps temporary objects alive: a freed object's id may be used again
    open_tuples: set[int] = set()

    def inside(key: str) -> str:
        inner_key = f"{_INNER}{len(found)}"
        outer[inner_key] = key
        return inner_key

    def shown(key: str) -> str:
        head, slash, rest = key.partition("/")
        return f"{shown(outer[head])}{slash}{rest}" if head in outer else key

    def of_key(key: str, k: object) -> str:
        if not is_plain_key(k):
            vet(shown(key), {k: None})
        try:
            return join(key, k)
        except ValueError as error:  # an integer with too many digits
            raise ProviderError(f"{shown(key)!r} has a key without a name: {error}") from error

    def leaf(key: str, array: Any, is_lazy: bool) -> ArrayLeaf:
        found.append((key, array, is_lazy))
        return _leaf(key, array, detached)

    def dressed_leaf(key: str, array: Any, kind: Any, attributes: Any) -> ArrayLeaf:
        made = copies[id(array)] = leaf(key, array, kind is None and lazy(key, array))
        inner_key = inside(key)
        made.kind, made.attributes = walk(kind, inner_key), walk(attributes, inner_key)
        return made

    def stateful_call(item: Any, key: str) -> Call:
        parts = item.__reduce__()
        made.append(parts)
        inner_key = inside(key)
        call = copies[id(item)] = Call(*(walk(part, join(inner_key, i)) for i, part in enumerate(parts)))
        return call

    def walk(item: Any, key: str) -> object:
        nonlocal depth
        depth += 1
        if depth > DEEPEST:
            raise ProviderError(f"{shown(key)[:80]!r}... is nested more than {DEEPEST} levels deep")
        copy = copied(item, key)
        depth -= 1
        return copy

    def copied(item: Any, key: str) -> object:
        if type(item) in _IMMUTABLE:
            return item
        if id(item) in copies:
            return copies[id(item)]
        if arrays.kind_of(item) is not None:
            if not detached and (beside := dressed.attributes_of([item])):
                return dressed_leaf(key, item, None, *beside)
            found_leaf = leaf(key, item, lazy(key, item))
            is_apart = found_leaf.parameter or found_leaf.requires_grad
            return leaves.setdefault(id(item), found_leaf) if is_apart else found_leaf
        if type(item) in (dict, OrderedDict):
            mapping = copies[id(item)] = type(item)()
            for k, v in item.items():
                mapping[k] = walk(v, of_key(key, k))
            if attributes := attributes_of(item):
                inner_key = inside(key)
                vars(mapping).update((k, walk(v, join(inner_key, k))) for k, v in attributes.items())
            return mapping
        if type(item) is list:
            sequence: list[object] = []
            copies[id(item)] = sequence
            sequence.extend(walk(v, join(key, i)) for i, v in enumerate(item))
            return sequence
        if _is_tuple(item) and id(item) not in open_tuples:
            if type(item) is not tuple:
                vet(shown(key), type(item))
            open_tuples.add(id(item))
            parts = [walk(v, join(key, i)) for i, v in enumerate(item)]
            open_tuples.remove(id(item))
            return tuple.__new__(type(item), parts)
        if is_plain(item):
            return item
        if dressed.is_tensor(item):  # sparse, meta and the like: __reduce_ex__ gives the plain tensors inside
            if dressed.is_uninitialized(item):
                raise ProviderError(f"{shown(key)!r} is uninitialized: call the lazy module once before it is saved")
            inner_key = inside(key)
            parts = item.__reduce_ex__(PROTOCOL)[:2]
            made.append(parts)
            memory = dressed.memory(parts)
            if memory is not None:
                copies[id(item)] = subclass = dressed_leaf(inner_key, memory, parts[1][1], parts[1][3])
                return subclass
            call = copies[id(item)] = Call(*(walk(part, join(inner_key, i)) for i, part in enumerate(parts)))
            return call
        if is_generator(item):  # its state is an array
            return stateful_call(item, key)
        opaque.append(item)
        opaque_keys.append(shown(key))
        return _Opaque(len(opaque) - 1)

    def inner(item: object) -> ArrayLeaf | None:
        if arrays.kind_of(item) != "torch":
            return None
        if dtensors.is_dtensor(item):  # it would come back as a plain tensor
            raise ProviderError("it holds a DTensor: keep DTensors in plain dicts, lists and tuples")
        made = leaf(f"{_INNER}{len(found)}", item, False)
        made.attributes = None if detached else next(iter(dressed.attributes_of([item]) or ()), None)
        return made

    tree.root = walk(value, "")
    if opaque:
        plain = len(found)
        tree._opaque = freeze(opaque, opaque_keys, inner)
        if len(found) > plain and not tree.thaws():
            # their own code needs real tensors: pickle the tensors with them
            del found[plain:]
            tree._opaque = freeze(opaque, opaque_keys, lambda _: None)
        if not tree.thaws():
            raise ProviderError(f"{', '.join(map(repr, opaque_keys))}: what they pickle cannot be read back")
    tree.shards = describer.describe([k for k, _, _ in found], [a for _, a, _ in found], [z for _, _, z in found])
    return tree


def _tied(values: Sequence[object], apart: Sequence[bool]) -> list[tuple[int, int]]:
    """Numbers of objects that occurred before, each with the number of the first occurrence.

    Only those marked ``apart`` are compared: parameters and tensors that require gradients. Others only share memory.
    """
    numbers = [i for i, is_apart in enumerate(apart) if is_apart]
    first: dict[int, int] = {}
    found = ((i, first.setdefault(id(values[i]), i)) for i in numbers)
    return [(i, number) for i, number in found if i != number]


def _leaf(key: str, array: object, detached: bool) -> ArrayLeaf:
    if detached:
        return ArrayLeaf(key)
    return ArrayLeaf(key, bool(getattr(array, "requires_grad", False)), arrays.is_parameter(array))


def _is_tuple(item: object) -> bool:
    return type(item) is tuple or (isinstance(item, tuple) and hasattr(item, "_fields"))


def is_plain(item: object) -> bool:
    """Whether a value is immutable and no container, so that it needs no copy."""
    if type(item) in _IMMUTABLE:
        return True
    torch = loaded("torch")
    if torch is not None and isinstance(item, (torch.Size, torch.dtype, torch.device, torch.layout)):
        return True
    return isinstance(item, np.generic) and not isinstance(item, (np.object_, np.void))


def _fill(item: Any, objects: list[object], seen: dict[int, object]) -> object:
    """Put the copied objects in the place of their stand-ins; containers keep their identity."""
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


def _plain_attributes(values: Sequence[object]) -> list[dict[str, Any]] | None:
    """A copy of each array's Python attributes; None if no array has any, an empty list if some are not plain."""
    live = dressed.attributes_of(values)
    if live is None:
        return None
    return [dict(own) for own in live] if all(is_plain(v) for own in live for v in own.values()) else []


def is_inner(key: str) -> bool:
    """Whether a key belongs to an array inside an object of another class."""
    return key.startswith(_INNER)


def _with(shards: Sequence[Shard], rest: object) -> Sequence[Shard]:
    """Array shards, then the object shard of the rest."""
    objects = [object_shard(source=rest)]
    if isinstance(shards, Shards):
        return Shards(shards.layout, shards.sources, objects, versions=shards.versions, memory=shards.memory)
    return [*shards, *objects]


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """The form of a nested value at the last snapshot.

    Attributes:
        skeleton: Its containers.
        detached: Whether its parameters were stored as plain tensors.
        parameter: For each array, whether it was stored as a parameter.
    """

    skeleton: Skeleton
    detached: bool
    parameter: list[bool]


def _plain_tree(
    form: _Form,
    values: Sequence[object],
    requires_grad: Sequence[bool],
    plain: Sequence[object],
    attributes: Sequence[dict[str, Any]] | None,
) -> PlainTree:
    tied = _tied(values, list(map(operator.or_, requires_grad, form.parameter)))
    return PlainTree(form.skeleton, requires_grad, form.parameter, plain, attributes, tied)


@dataclass(frozen=True, slots=True, eq=False)
class _Knowledge:
    form: _Form | None
    arrays: Known | None


class TreeProvider(StateProvider):
    """A provider whose state is one nested value. Subclasses say where the value comes from and goes to."""

    def __init__(self, name: str) -> None:
        """Name the provider: ``name`` is the top-level key in the checkpoint."""
        super().__init__(name)
        self._describer = Describer()
        self._form: _Form | None = None
        self._lazy_flags: list[bool] | None = None

    @abstractmethod
    def value(self) -> object:
        """The live state."""

    @abstractmethod
    def is_lazy(self, key: str, array: object) -> bool:
        """Whether an array of the live state stays unchanged until the snapshot is captured."""

    def _current(self) -> tuple[object, bool]:
        """The value to save, and whether to store its parameters as plain tensors."""
        return self.value(), False

    @abstractmethod
    def match(self, stored: object, saved: Saved) -> Sequence[tuple[str, object]]:
        """The arrays to restore into, with their keys. ``stored`` is the stored value, an ArrayRef for each array.

        Reports differences to ``saved``.
        """

    def knowledge(self) -> object:
        """The containers, and the addresses and layouts of the arrays."""
        known = self._describer.known
        return None if self._form is None and known is None else _Knowledge(self._form, known)

    def learn(self, knowledge: object) -> None:
        """Take what an earlier provider found out, except which arrays are lazy: this provider decides that anew."""
        assert isinstance(knowledge, _Knowledge)
        self._form, self._describer.known, self._lazy_flags = knowledge.form, knowledge.arrays, None

    @deeper()
    def shards(self) -> Sequence[Shard]:
        """Split the live value: a shard for each array, then the object shard of the rest."""
        value, detached = self._current()
        again = self._again(value, detached)
        if again is not None:
            return again
        self._form = None
        skeleton = Skeleton.of(value, is_plain)
        stripped = None if skeleton is None else skeleton.strip(value)
        attributes = None if stripped is None or detached else _plain_attributes(stripped[0])
        if skeleton is None or stripped is None or attributes == []:
            tree = take_apart(value, self.is_lazy, self._describer, detached=detached)
            tree.name = self.name
            return _with(tree.shards, tree)
        keys, (values, plain) = skeleton.keys, stripped
        self._lazy_flags = list(map(self.is_lazy, keys, values))
        parameter = [not detached and arrays.is_parameter(array) for array in values]
        shards = self._describer.describe(keys, values, self._lazy_flags)
        requires_grad = [not detached and bool(getattr(array, "requires_grad", False)) for array in values]
        self._form = _Form(skeleton, detached, parameter)
        return _with(shards, _plain_tree(self._form, values, requires_grad, plain, attributes))

    def _again(self, value: object, detached: bool) -> Sequence[Shard] | None:
        """The shards, if the value has the same structure and memory as last time; else None."""
        form = self._form
        stripped = None if form is None or form.detached != detached else form.skeleton.strip(value)
        if form is None or stripped is None:
            return None
        keys, (values, plain) = form.skeleton.keys, stripped
        shards = self._describer.again(keys, values, self._lazy_again(keys, values))
        if shards is None:
            return None
        attributes = None if detached else _plain_attributes(values)
        if attributes == []:
            return None
        requires_grad = [False] * len(keys) if detached else list(map(attrgetter("requires_grad"), values))
        return _with(shards, _plain_tree(form, values, requires_grad, plain, attributes))

    def _lazy_again(self, keys: Sequence[str], values: Sequence[object]) -> list[bool]:
        """The answers of :meth:`is_lazy` for arrays of the same keys and structure as last time, kept between calls."""
        if self._lazy_flags is None:
            self._lazy_flags = list(map(self.is_lazy, keys, values))
        return self._lazy_flags

    def serialize(self, shard: Shard) -> Encoder:
        """Return the encoder, which runs in the background: :meth:`shards` has copied the rest."""
        assert isinstance(shard.source, (Tree, PlainTree))
        return shard.source.encode

    @deeper()
    def destinations(self, saved: Saved) -> Sequence[Shard]:
        """The arrays that :meth:`match` chooses, and the object that holds the rest."""
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
        """Keys of all arrays in the stored value, including every one that shares memory with another."""
        return saved.arrays() if "" in saved.objects() else saved.every_key()

    @deeper()
    def restore(self, shard: Shard, value: object) -> None:
        """Hand the whole value, with its restored arrays, to :meth:`accept`."""
        self.accept(shard.source.assemble(value) if isinstance(shard.source, ByKey) else value)

    @abstractmethod
    def accept(self, value: Any) -> None:
        """Restore from ``value`` what is not in place yet."""
