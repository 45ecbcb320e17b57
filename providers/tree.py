"""Nested containers as shards: every array a shard of its own, everything else one object that refers to them."""

from __future__ import annotations

import io
import pickle
import sys
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from datastates import arrays
from datastates.errors import ProviderError
from datastates.keys import join
from datastates.pickling import PROTOCOL, ArrayLeaf, StoredArray, dumps
from datastates.protocol import ArrayRef, Encoder, Saved, Shard, StateProvider, object_shard
from datastates.unpickling import Unbuilt

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

    shards: list[Shard] = field(default_factory=list)
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


def take_apart(value: object, lazy: Lazy) -> Tree:
    """Walk nested dicts, lists and tuples; arrays become shards, everything else is copied now.

    Containers that occur twice, or in themselves, do so in the copy. Objects of other classes are copied by pickling
    them; torch tensors inside them become shards too, which are never lazy.

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
        parameter = arrays.kind_of(array) == "torch" and type(array).__name__ == "Parameter"
        return ArrayLeaf(key, bool(getattr(array, "requires_grad", False)), parameter)

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
        if _is_constant(item):
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
        return leaf(f"{_INNER}{len(found)}", item, False)

    tree.root = walk(value, "")
    if opaque:
        outer = len(found)
        tree._opaque = _freeze(opaque, opaque_keys, inner)
        if len(found) > outer and not tree.thaws():
            # their own code wants real tensors to build them: then the tensors are pickled with them
            del found[outer:]
            tree._opaque = _freeze(opaque, opaque_keys, lambda _: None)
    tree.shards = arrays.shards_of(found)
    return tree


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


def _is_constant(item: object) -> bool:
    """Immutable values of other libraries: they need no copy."""
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


class TreeProvider(StateProvider):
    """A provider whose state is one nested value; subclasses say where it comes from and goes to."""

    @abstractmethod
    def value(self) -> object:
        """The live state."""

    @abstractmethod
    def is_lazy(self, key: str, array: object) -> bool:
        """Whether an array of the live state stays unchanged until the snapshot is captured."""

    @abstractmethod
    def match(self, stored: object, saved: Saved) -> Sequence[Shard]:
        """The arrays to restore into, given the stored value with an ArrayRef for each array; reports what differs."""

    def shards(self) -> Sequence[Shard]:
        """Take the live value apart: its arrays, then the object that holds all the rest."""
        tree = take_apart(self.value(), self.is_lazy)
        return [*tree.shards, object_shard(source=tree)]

    def serialize(self, shard: Shard) -> Encoder:
        """The rest was copied by :meth:`shards`; encoding it is left to the background."""
        assert isinstance(shard.source, Tree)
        return shard.source.encode

    def destinations(self, saved: Saved) -> Sequence[Shard]:
        """What the live state and the stored one have in common, and whatever else the subclass wants."""
        if "" not in saved.objects():
            saved.report(mismatched={"": "was not saved as a nested value"})
            return []
        return [*self.match(saved.structure(""), saved), object_shard()]


@dataclass
class Differences:
    """What :func:`pair` found, by key within the provider."""

    pairs: list[tuple[ArrayRef, object]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    leaves: list[tuple[str, object, object]] = field(default_factory=list)


def pair(stored: object, live: object, known: Container[str]) -> Differences:
    """Compare a stored value with a live one, container by container.

    Args:
        stored: The stored value, an ArrayRef for each array.
        live: The live one.
        known: Keys of the stored arrays.
    """
    result = Differences()
    seen: set[tuple[int, int]] = set()

    def walk(s: Any, v: Any, key: str) -> None:
        if (id(s), id(v)) in seen:
            return
        is_array = arrays.kind_of(v) is not None
        if isinstance(s, ArrayRef) and is_array:
            # the same memory may be stored under several keys, and the reference name another of them
            result.pairs.append((replace(s, key=key) if key in known else s, v))
        elif isinstance(s, ArrayRef) or is_array:
            what = ("an array", "none") if isinstance(s, ArrayRef) else ("no array", "one")
            result.mismatched[key] = f"{what[0]} in the checkpoint, {what[1]} in the live state"
        elif isinstance(s, dict) and isinstance(v, dict):
            seen.add((id(s), id(v)))
            result.unexpected += [join(key, k) for k in s if k not in v]
            result.missing += [join(key, k) for k in v if k not in s]
            for k in s:
                if k in v:
                    walk(s[k], v[k], join(key, k))
        elif isinstance(v, (list, tuple)) and isinstance(s, (list, tuple, Unbuilt)):
            s = s.arguments if isinstance(s, Unbuilt) else s
            seen.add((id(s), id(v)))
            result.unexpected += [join(key, i) for i in range(len(v), len(s))]
            result.missing += [join(key, i) for i in range(len(s), len(v))]
            for i in range(min(len(s), len(v))):
                walk(s[i], v[i], join(key, i))
        elif isinstance(s, (dict, list, tuple)) or isinstance(v, (dict, list, tuple)):
            result.mismatched[key] = f"{type(s).__name__} in the checkpoint, {type(v).__name__} in the live state"
        else:
            result.leaves.append((key, s, v))

    walk(stored, live, "")
    return result
