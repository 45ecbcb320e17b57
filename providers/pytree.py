"""A provider of a pytree, as in JAX's programs. Its arrays cannot be written, so a restore makes new ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from datastates._base import gc_pause
from datastates.errors import ProviderError
from datastates.providers.nested.known_leaves import (
    KEY_DATA,
    KEY_NAME,
    KnownLeaves,
    contents_of,
    is_array,
    is_static,
    nested_leaves,
    refuse_callable,
    taken_apart,
)
from datastates.providers.nested.pairing import pair
from datastates.providers.nested.tree import Match, TreeProvider
from datastates.state import arrays, dtensors, jax_arrays, laziness, memory, subclasses, together
from datastates.state.depth import deeper
from datastates.state.provider import Saved
from datastates.state.pytrees import Leaves, Path, find, key_of, leaves_of, nested, tied, without_empty
from datastates.state.replacements import Landing, describes, why_not_made
from datastates.state.shards import ArrayRef, Shard, Shards, object_shard

_NUMBERS = (bool, int, float, complex)


def is_number(value: object) -> bool:
    """Whether a value is a number of Python, of NumPy or of ml_dtypes."""
    return type(value) in _NUMBERS or (isinstance(value, np.generic) and is_array(np.asarray(value)))


def as_stored(leaves: Leaves, stored: object) -> Leaves:
    """Replace live numbers that were saved as arrays by arrays, and live arrays that were saved as numbers by numbers.

    Args:
        leaves: The live tree.
        stored: The stored value, with an ArrayRef for each array.
    """
    pairs = zip(leaves.paths, leaves.values, strict=True)
    return replace(leaves, values=[_as_stored(stored, path, leaf) for path, leaf in pairs])


def _as_stored(stored: object, path: Path, leaf: Any) -> Any:
    if not is_number(leaf) and (not is_array(leaf) or tuple(leaf.shape)):
        return leaf
    try:
        theirs = find(stored, path)
    except KeyError:
        return leaf
    if is_number(leaf) and type(theirs) is ArrayRef and not theirs.shape:
        return memory.empty(replace(theirs, kind="numpy", requires_grad=False))
    return theirs if holds(leaf, theirs) else leaf


def holds(like: Any, number: Any) -> bool:
    """Whether an array of one element, of JAX or NumPy, can hold a number: it has its type and range.

    Python's numbers may go into an array of any width.
    """
    if not is_number(number) or not is_array(like) or tuple(like.shape) or why_not_made(like) is not None:
        return False
    if isinstance(number, np.generic) or not isinstance(like.dtype, np.dtype):
        return bool(like.dtype == getattr(number, "dtype", None))
    try:
        with np.errstate(over="ignore"):
            found = np.array(number).astype(like.dtype).item()
    except OverflowError:
        return False
    if type(found) is not type(number):
        return False
    return bool(found == number) if type(number) is int else bool(np.isfinite(found) == np.isfinite(number))


def array_of(like: Any, number: Any) -> Any:
    """Make an array that holds a number, with the library, devices and sharding of the array ``like``."""
    landing = Landing.of(like)
    for _, into in landing.parts:
        into[...] = number
    return landing.assemble()


def from_pytree(
    name: str, tree: object = None, *, get: Callable[[], Any] | None = None, set: Callable[[Any], Any] | None = None
) -> PytreeProvider:
    """Make a provider for a pytree: each array becomes a shard, the other leaves are serialized.

    JAX's arrays never change, so they need no gate. On the CPU ``snapshot()`` copies them. On accelerators they are
    captured lazily; if one is donated before it is captured, the snapshot fails. Of a sharded array each process saves
    the boxes that it holds; a box that several processes hold is saved by one of them. Tensors in memory that torch
    alone can write are lazy, too, and need the gate. NumPy and CuPy arrays and other leaves are copied. Functions are
    not saved, and stay. ``load`` gives empty dicts, lists and tuples and None as they are, and None for an empty
    container of any other class. A restore does not compare them.

    A restore makes new arrays and puts them into a new tree. Each has the devices and the sharding of the array that it
    replaces. The old tree is not written. A ``jax.ShapeDtypeStruct`` may stand in the tree for an array.

    Args:
        name: Top-level key in the checkpoint.
        tree: The first tree. Assign new ones to :attr:`PytreeProvider.tree` as training goes on.
        get: Instead of ``tree``: a callable that returns the tree at each snapshot and restore.
        set: With ``get``: a callable that takes the restored tree.

    Returns:
        The provider. Its keys are the paths in the tree, joined by ``/``.

    Raises:
        TypeError: There is neither a tree nor both callables, or more than that.
    """
    if (tree is None) == (get is None) or (get is None) != (set is None):
        raise TypeError(f"{name!r}: from_pytree takes a tree, or get= and set=")
    return PytreeProvider(name, tree, get, set)


class PytreeProvider(TreeProvider):
    """The leaves of one tree. :func:`from_pytree` makes it."""

    takes_parts = True

    def __init__(
        self, name: str, tree: object, get: Callable[[], Any] | None, set: Callable[[Any], Any] | None
    ) -> None:
        """Keep the tree or the callables; see :func:`from_pytree`."""
        super().__init__(name)
        self._tree = tree
        self._get, self._set = get, set
        self._known: KnownLeaves | None = None

    @property
    def tree(self) -> Any:
        """The tree as it is now. Assign to it when training has made a new one."""
        return self._tree if self._get is None else self._get()

    @tree.setter
    def tree(self, tree: object) -> None:
        if self._set is None:
            self._tree = tree
        else:
            self._set(tree)

    def value(self) -> object:
        """The leaves in plain dicts and lists, without functions."""
        return _contents(self.tree)

    def is_lazy(self, key: str, array: object) -> bool:
        """Whether no change of an array can go unseen."""
        del key
        return laziness.is_lazy_by_default(array)

    @deeper()
    @gc_pause.paused()
    def shards(self) -> Sequence[Shard]:
        """Describe each box of an array as a shard, and all other values as one object.

        In a program of several processes, arrays that are not JAX's must be the same in all of them, which is compared.
        """
        tree = self.tree
        if self._known is not None and (again := self._known.again(tree)) is not None:
            return again
        self._known = None
        shards, every = self._described(_contents(tree), False), jax_arrays.processes()
        if every:
            shards = [s if s.is_object or s.kind == "jax" else replace(s, replicas=every) for s in shards]
        if self._form is not None and not isinstance(shards, Shards):
            self._known = KnownLeaves.of(tree, self._form.skeleton, shards[:-1])
        return shards if self._known is None else self._known.again(tree) or shards

    def knowledge(self) -> object:
        """The containers, and the types, shapes and shardings of the arrays."""
        inner = super().knowledge()
        return None if inner is None and self._known is None else (inner, self._known)

    def learn(self, knowledge: object) -> None:
        """Take the findings of an earlier provider."""
        assert isinstance(knowledge, tuple)
        inner, self._known = knowledge
        if inner is not None:
            super().learn(inner)

    @deeper()
    def destinations(self, saved: Saved) -> Sequence[Shard]:
        """New memory for each array that both the tree and the checkpoint have, and the object of the other values."""
        if "" not in saved.objects():
            saved.report(mismatched={"": "was not saved as a nested value"})
            return []
        found = self.match(saved.structure(""), saved)
        rest = object_shard(source=(found.accept, None))
        return [*(shard for key, into in found.pairs for shard in _shards(key, into)), rest]

    def match(self, stored: object, saved: Saved) -> Match:
        """Restore into new memory, a landing, for each array that both the tree and the stored value have."""
        stored, leaves = without_empty(stored), taken_apart(self.tree)
        stands: dict[int, tuple[object, object]] = {}  # by the id of a stand-in: itself, its leaf
        live = nested_leaves(as_stored(leaves, stored), stands)
        found = pair(stored, live, saved.arrays())
        mismatched, names = dict(found.mismatched), _names(leaves)
        for key, theirs, ours in found.leaves:
            if key in names and theirs != ours:
                mismatched[key] = f"random keys of {theirs!r} in the checkpoint, of {ours!r} in the live state"
        mismatched |= _torn_ties(self.tree, leaves, stored)
        others = {names[key] for key in mismatched if key in names}  # keys of another generator
        pairs = [(ref.key, stands.get(id(leaf), (None, leaf))[1]) for ref, leaf in found.pairs if ref.key not in others]
        flaws = {key: flaw for key, like in pairs if (flaw := why_not_made(like)) is not None}
        saved.report(missing=found.missing, unexpected=found.unexpected, mismatched=mismatched | flaws)
        known = saved.arrays()
        tensors = {
            k: like for k, like in pairs if subclasses.is_tensor(like) and k in known and arrays.fits(known[k], like)
        }
        views = together.shared(saved, tensors, tensors)
        landed = [(key, Landing.of(like, views.get(key))) for key, like in pairs if key not in flaws]
        memory = _Landed(dict(landed), known, saved.restored_keys)
        return Match([*landed, *self.inside(saved)], partial(self._accept, memory))

    def arrays_by_name(self, saved: Saved) -> Sequence[Shard]:
        """New memory for each array. Typed random keys get the stored numbers, and keep their own generator."""
        shards: list[Shard] = []
        known = saved.arrays()
        for path, like in _arrays(taken_apart(self.tree)):
            _refuse_dtensor(path, like)
            key = key_of(path)
            if (flaw := why_not_made(like)) is None:
                shards += Landing.of(like).shards(key)
            elif key in known:
                saved.report(mismatched={key: flaw})
            else:
                saved.report(missing=[key])
        return shards

    def take_arrays(self, shards: Sequence[Shard], saved: Saved) -> None:
        """Put the restored arrays into a new tree, and hand the tree over."""
        del saved
        parts: dict[str, list[Shard]] = {}
        for shard in shards:
            parts.setdefault(shard.key, []).append(shard)
        arrays = [(path, like, key_of(path)) for path, like in _arrays(leaves_of(self.tree))]
        found = [(path, Landing.filled(like, parts[key])) for path, like, key in arrays if key in parts]
        landings = {key_of(path): landing for path, landing in found}
        memory = [landing.parts[0][1] for _, landing in found]  # the first part's memory stands for the array
        landed = _Landed(landings, landings, lambda: landings)
        self._accept(landed, nested([path for path, _ in found], memory))

    @deeper()
    def _accept(self, landed: _Landed, value: Any) -> None:
        """Put the restored leaves into a new tree, and hand the tree over."""
        leaves = leaves_of(self.tree)
        pairs = zip(leaves.paths, leaves.values, strict=True)
        self.tree = leaves.rebuild([landed.leaf(value, path, leaf) for path, leaf in pairs])


class _Landed:
    """The memory that a restore reads into, for each array of the live tree.

    Two leaves that were the same array when they were saved are one array in the restored value. In the live tree each
    leaf may have devices and a sharding of its own. So each leaf has memory of its own, which is found by its key.
    """

    def __init__(
        self, landings: Mapping[str, Landing], stored: Collection[str], restored: Callable[[], Collection[str]]
    ) -> None:
        """Keep the memory of all arrays.

        Args:
            landings: The memory by key.
            stored: The keys of all stored arrays.
            restored: Returns the keys that were restored. Called when the first leaf is made.
        """
        self._landings = landings
        self._stored = stored
        self._restored_keys = restored
        self._memory = {id(memory): landing for landing in landings.values() for _, memory in landing.parts}
        self._restored: Collection[str] | None = None

    def leaf(self, value: Any, path: Path, leaf: Any) -> Any:
        """The leaf for the new tree; the old leaf if it was not restored."""
        if jax_arrays.is_key(leaf):
            data = self._array(value, (*path, KEY_DATA))
            return leaf if data is None else jax_arrays.as_keys(data, jax_arrays.key_name(leaf))
        if is_array(leaf):
            array = self._array(value, path)
            if arrays.kind_of(array) is not None:
                return array
            return array_of(leaf, array) if holds(leaf, array) else leaf
        try:
            found = leaf if is_static(leaf) else find(value, path)
        except KeyError:
            return leaf
        if is_number(leaf) and arrays.kind_of(found) is not None:
            number = self._array(value, path)
            if number is None:
                return leaf
            return number[()] if isinstance(leaf, np.generic) else number.item()
        return leaf if isinstance(found, ArrayRef) else found  # a reference stands for a value that is not selected

    def _array(self, value: Any, path: Path) -> Any:
        """The restored array at a path; None if it was not restored."""
        try:
            found = find(value, path)
        except KeyError:
            return None
        return None if isinstance(found, ArrayRef) else self._new(key_of(path), found)

    def _new(self, key: str, found: Any) -> Any:
        """The new array of a key; None if it was not restored. ``found`` is the restored value's item with the key."""
        if self._restored is None:
            self._restored = self._restored_keys()
        by_place = self._memory.get(id(found))
        if by_place is None:
            return found  # a tensor that torch has made anew, as a subclass or with attributes
        if key in self._landings:
            return self._landings[key].assemble() if key in self._restored else None
        return None if key in self._stored else by_place.assemble()  # stored under another key only


def _contents(tree: object) -> object:
    leaves = leaves_of(tree)
    for path, leaf in zip(leaves.paths, leaves.values, strict=True):
        if describes(leaf):
            raise ProviderError(f"{key_of(path)!r} describes an array, and has no contents to save")
        _refuse_dtensor(path, leaf)
        if hasattr(leaf, "load_state_dict") and not isinstance(leaf, type):
            raise ProviderError(
                f"{key_of(path)!r} is a {type(leaf).__name__}, which has a state_dict(): use from_stateful"
            )
    refuse_callable(leaves)
    return contents_of(tree, leaves)


def _refuse_dtensor(path: Path, leaf: object) -> None:
    if dtensors.is_dtensor(leaf):
        raise ProviderError(f"{key_of(path)!r} is a DTensor, which is restored in place: use from_state_dict")


def _arrays(leaves: Leaves) -> Iterator[tuple[Path, Any]]:
    """Yield the arrays, and descriptions of arrays, among the leaves, with their paths; of random keys, the numbers."""
    for path, leaf in zip(leaves.paths, leaves.values, strict=True):
        if jax_arrays.is_key(leaf):
            yield (*path, KEY_DATA), jax_arrays.key_data(leaf)
        elif is_array(leaf):
            yield path, leaf


def _names(leaves: Leaves) -> dict[str, str]:
    """For each leaf of typed random keys: the key of the generator's name, and as its value the key of the numbers."""
    pairs = zip(leaves.paths, leaves.values, strict=True)
    return {key_of((*path, KEY_NAME)): key_of((*path, KEY_DATA)) for path, leaf in pairs if jax_arrays.is_key(leaf)}


def _torn_ties(tree: object, leaves: Leaves, stored: object) -> dict[str, str]:
    """Find variables that stand at several places of the live tree, and were saved with other contents at each."""
    found: dict[str, str] = {}
    for later, first in tied(tree):
        one, other = (_found(stored, leaves.paths[i]) for i in (later, first))
        if isinstance(one, ArrayRef) and isinstance(other, ArrayRef) and one.key != other.key:
            found[key_of(leaves.paths[later])] = (
                f"one array with {key_of(leaves.paths[first])!r} in the live state, as tied weights are, and an array "
                "of its own in the checkpoint"
            )
    return found


def _found(stored: object, path: Path) -> object:
    try:
        return find(stored, path)
    except KeyError:
        return None


def _shards(key: str, into: object) -> list[Shard]:
    return into.shards(key) if isinstance(into, Landing) else [arrays.destination(key, into)]
