"""Trees of containers as JAX sees them, taken apart into leaves. Without JAX: of dicts, lists and tuples."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

from datastates._base.loaded import loaded
from datastates.errors import ProviderError
from datastates.state import keys


class Step(NamedTuple):
    """One step of a path: a name or number, and whether it is a position in a list or tuple."""

    part: Any
    is_position: bool


Path = tuple[Step, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """A tree taken apart into leaves. ``None`` is no leaf, as in JAX.

    Attributes:
        paths: The path to each leaf.
        values: The leaves.
        rebuild: Makes a tree of the same containers around other leaves, which it takes in the same order. A module or
            variable of Flax NNX that occurs several times in the tree gets the leaves of its first place.
    """

    paths: list[Path]
    values: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]


def leaves_of(tree: object) -> Leaves:
    """Take a tree apart. If JAX is imported, JAX does it, and every class registered with JAX is a container."""
    jax: Any = loaded("jax")
    if jax is not None:
        pairs, form = jax.tree_util.tree_flatten_with_path(tree)
        paths = [tuple(_step(jax.tree_util, entry) for entry in path) for path, _ in pairs]
        return Leaves(paths, [leaf for _, leaf in pairs], partial(_with_ties, jax.tree_util, tree, form))
    found = list(_walk(tree, ()))
    return Leaves([path for path, _ in found], [leaf for _, leaf in found], lambda values: _rebuilt(tree, iter(values)))


def tied(tree: object) -> list[tuple[int, int]]:
    """Find the leaves of modules and variables of Flax NNX that occur several times in a tree, as tied weights do.

    Returns:
        For each leaf at a later place: its number in the order of :func:`leaves_of`, and its number at the first place.
    """
    jax: Any = loaded("jax")
    if jax is None or not _has_nodes(jax.tree_util, tree):
        return []
    pairs: list[tuple[int, int]] = []
    _Ties(jax.tree_util, itertools.count(), lambda later, first: pairs.append((later, first))).build(tree)
    return pairs


def _with_ties(tree_util: Any, tree: object, form: Any, values: Sequence[Any]) -> Any:
    if not _has_nodes(tree_util, tree):
        return form.unflatten(values)
    return _Ties(tree_util, iter(values)).build(tree)


def _has_nodes(tree_util: Any, tree: object) -> bool:
    """Whether a tree has modules or variables of NNX: JAX would build each anew for each place where it stands."""
    return loaded("flax.nnx") is not None and any(map(_is_node, tree_util.tree_leaves(tree, is_leaf=_is_node)))


def _is_node(item: object) -> bool:
    nnx: Any = loaded("flax.nnx")
    return isinstance(item, (nnx.Module, nnx.Variable, getattr(nnx, "Pytree", nnx.Object)))


class _Ties:
    """Builds a tree around new leaves, container by container, and what is one object in the old tree only once."""

    def __init__(
        self, tree_util: Any, leaves: Iterator[Any], tell: Callable[[Any, Any], object] = lambda later, first: None
    ) -> None:
        """Begin a tree.

        Args:
            tree_util: ``jax.tree_util``.
            leaves: The new leaves.
            tell: Is called with each leaf at a later place, and the one at the first place.
        """
        self._tree_util = tree_util
        self._leaves = leaves
        self._tell = tell
        self._built: dict[int, tuple[Any, Any, list[Any]]] = {}  # by the id of a node: it, the new one, its leaves
        self._taken: list[Any] = []

    def build(self, item: Any) -> Any:
        """Build the counterpart of a part of the old tree."""
        children, form = self._tree_util.tree_flatten(item, is_leaf=lambda one: one is not item)
        if form.num_nodes == form.num_leaves == 1:
            self._taken.append(next(self._leaves))
            return self._taken[-1]
        begin = len(self._taken)
        made = form.unflatten([self.build(child) for child in children])
        if not _is_node(item):
            return made
        own = self._taken[begin:]
        _, first, leaves = self._built.setdefault(id(item), (item, made, own))
        if first is not made:
            for later, one in zip(own, leaves, strict=True):
                self._tell(later, one)
        return first


def flatten(tree: object) -> tuple[list[Any], object] | None:
    """Take a tree apart by JAX.

    The form has JAX's description of the containers, which compares their classes and their static fields. It has the
    paths, too: some classes name their children in the paths only.

    Returns:
        The leaves, in the order of :func:`leaves_of`, and the form, to compare with other trees' forms. None if JAX is
        not imported.
    """
    jax: Any = loaded("jax")
    if jax is None:
        return None
    pairs, form = jax.tree_util.tree_flatten_with_path(tree)
    return [leaf for _, leaf in pairs], (form, [path for path, _ in pairs])


def empty_in(tree: object) -> list[tuple[Path, object]]:
    """Find the containers without children in a tree, and ``None``, which is one, too.

    Returns:
        The path to each, with an empty dict, list or tuple; None stands for ``None``, and for any other class.
    """
    jax: Any = loaded("jax")
    if jax is None:
        return [(path, _emptied(item)) for path, item in _walk_empty(tree, ())]
    one_level = jax.tree_util.default_registry.flatten_one_level

    def is_empty(item: object) -> bool:
        parts = one_level(item)
        return parts is not None and not any(not _is_mark(child) for child in parts[0])

    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)
    found = [(path, item) for path, item in pairs if is_empty(item) and not _is_mark(item)]
    return [(tuple(_step(jax.tree_util, entry) for entry in path), _emptied(item)) for path, item in found]


def _is_mark(item: object) -> bool:
    """Whether a value is NNX's own mark in each of its objects, which is a container for JAX."""
    return type(item).__name__ == "PytreeState" and type(item).__module__.startswith("flax.nnx")


def _walk_empty(item: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if item is None or (isinstance(item, dict | list | tuple) and not item):
        yield path, item
    elif isinstance(item, dict | list | tuple):
        for step, child in _children(item):
            yield from _walk_empty(child, (*path, step))


def _emptied(item: object) -> object:
    if type(item) is tuple:
        return ()
    return {} if isinstance(item, MutableMapping) else [] if isinstance(item, MutableSequence) else None


def without_empty(value: Any) -> Any:
    """A copy of a stored value without its empty entries; of an empty value, an empty dict."""
    found = _pruned(value, {})
    return {} if found is None else found


def _pruned(value: Any, known: dict[int, Any]) -> Any:
    """A value without the empty entries in it; None if nothing is left. A position of a list stays.

    ``known`` gets the result for each container, by id: a damaged value may have one at many places, or in itself.
    """
    if type(value) not in (dict, list):
        return None if type(value) is tuple and not value else value
    if id(value) not in known:
        known[id(value)] = None
        if isinstance(value, dict):
            kept: Any = {key: found for key, item in value.items() if (found := _pruned(item, known)) is not None}
        else:
            kept = [_pruned(item, known) for item in value]
            while kept and kept[-1] is None:
                kept.pop()
        known[id(value)] = kept or None
    return known[id(value)]


def is_leaf(tree: object) -> bool:
    """Whether a value is a leaf, not a container."""
    return leaves_of(tree).paths == [()]


def _step(tree_util: Any, entry: Any) -> Step:
    if isinstance(entry, tree_util.SequenceKey):
        return Step(entry.idx, True)
    if isinstance(entry, tree_util.GetAttrKey):
        return Step(entry.name, False)
    if isinstance(entry, (tree_util.DictKey, tree_util.FlattenedIndexKey)):
        return Step(entry.key, False)
    return Step(str(entry), False)  # a class may name its children by keys of a class of its own


def _walk(item: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if item is None:
        return
    if not isinstance(item, dict | list | tuple):
        yield path, item
        return
    for step, child in _children(item):
        yield from _walk(child, (*path, step))


def _children(item: Any) -> Iterator[tuple[Step, Any]]:
    if isinstance(item, dict):
        yield from ((Step(key, False), child) for key, child in item.items())
    else:
        names = getattr(item, "_fields", None)
        parts = enumerate(item) if names is None else zip(names, item, strict=True)
        yield from ((Step(part, names is None), child) for part, child in parts)


def _rebuilt(item: Any, values: Iterator[Any]) -> Any:
    if item is None:
        return None
    if not isinstance(item, dict | list | tuple):
        return next(values)
    parts = [_rebuilt(child, values) for _, child in _children(item)]
    if isinstance(item, dict):
        made = copy.copy(item)  # a subclass of dict may have attributes besides its items
        made.update(zip(item, parts, strict=True))
        return made
    return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)


def key_of(path: Path) -> str:
    """Write a path as a shard's key."""
    return reduce(keys.join, (step.part for step in path), "")


def nested(paths: Sequence[Path], values: Sequence[object], empty: Sequence[tuple[Path, object]] = ()) -> object:
    """Nest leaves in plain dicts, and in lists where all steps of a container are positions.

    A position of a list at which there is nothing holds None.

    Args:
        paths: The paths to the leaves.
        values: The leaves.
        empty: What stands at places without leaves, as :func:`empty_in` finds it.

    Raises:
        ProviderError: Two leaves have one key, or a leaf is where another path leads through.
    """
    root = _Node()
    for path, value in zip(paths, values, strict=True):
        if not path:
            return value
        at = root
        for step in path[:-1]:
            found = at.setdefault(step.part, _Node())
            if not isinstance(found, _Node):
                raise ProviderError(f"{key_of(path)!r} lies below another leaf of the tree")
            at.are_positions &= step.is_position
            at = found
        at.are_positions &= path[-1].is_position
        if path[-1].part in at:
            raise ProviderError(f"two leaves of the tree have the key {key_of(path)!r}")
        at[path[-1].part] = value
    for path, value in empty:
        if not path:
            return value
        root.add_empty(path, value)
    return root.plain()


class _Node(dict[Any, Any]):
    """A container of leaves and other nodes, by the steps that lead to them."""

    are_positions = True

    def add_empty(self, path: Path, value: object) -> None:
        """Put a value at a path, unless something is there already, or on the way, or it would be a name in a list."""
        first, *rest = path
        if self and self.are_positions and not first.is_position:
            return  # this is a list
        inner = self.setdefault(first.part, _Node() if rest else value)
        if rest and isinstance(inner, _Node):
            inner.add_empty(tuple(rest), value)
        self.are_positions &= first.is_position

    def plain(self) -> Any:
        children = {part: child.plain() if isinstance(child, _Node) else child for part, child in self.items()}
        if not self or not self.are_positions:
            return children
        return [children.get(i) for i in range(max(children) + 1)]


def find(value: Any, path: Path) -> object:
    """Look up the value at a path inside a nested value; raises KeyError if there is none."""
    for step in path:
        try:
            value = value[step.part]
        except (TypeError, IndexError):  # the stored value has another structure
            raise KeyError(key_of(path)) from None
    return value
