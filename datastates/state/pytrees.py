"""Trees of containers as JAX sees them, taken apart into leaves. Without JAX: of dicts, lists and tuples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
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
    """A tree taken apart.

    Attributes:
        paths: The way to each leaf. ``None`` in the place of a value is no leaf.
        values: The leaves.
        rebuild: Makes a tree of the same containers around other leaves.
    """

    paths: list[Path]
    values: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]


def leaves_of(tree: object) -> Leaves:
    """Take a tree apart: by JAX where that is imported, so that all classes are containers that are known to it."""
    jax: Any = loaded("jax")
    if jax is not None:
        pairs, form = jax.tree_util.tree_flatten_with_path(tree)
        paths = [tuple(_step(jax.tree_util, entry) for entry in path) for path, _ in pairs]
        return Leaves(paths, [leaf for _, leaf in pairs], form.unflatten)
    found = list(_walk(tree, ()))
    return Leaves([path for path, _ in found], [leaf for _, leaf in found], lambda values: _rebuilt(tree, iter(values)))


def flatten(tree: object) -> tuple[list[Any], object] | None:
    """The leaves of a tree in the order of :func:`leaves_of`, and its containers, which can be compared with others.

    Of the containers, JAX compares the classes and what they say to be static. The paths are compared besides: a class
    may name its children by them alone.

    Returns:
        None where JAX is not imported.
    """
    jax: Any = loaded("jax")
    if jax is None:
        return None
    pairs, form = jax.tree_util.tree_flatten_with_path(tree)
    return [leaf for _, leaf in pairs], (form, [path for path, _ in pairs])


def is_leaf(tree: object) -> bool:
    """Whether a tree is one leaf."""
    return leaves_of(tree).paths == [()]


def _step(tree_util: Any, entry: Any) -> Step:
    if isinstance(entry, tree_util.SequenceKey):
        return Step(entry.idx, True)
    if isinstance(entry, tree_util.GetAttrKey):
        return Step(entry.name, False)
    if isinstance(entry, (tree_util.DictKey, tree_util.FlattenedIndexKey)):
        return Step(entry.key, False)
    return Step(str(entry), False)  # a class may have steps of a class of its own


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
        made = copy.copy(item)  # a class of its own may have more than items
        made.update(zip(item, parts, strict=True))
        return made
    return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)


def key_of(path: Path) -> str:
    """A path as a shard's key."""
    return reduce(keys.join, (step.part for step in path), "")


def nested(paths: Sequence[Path], values: Sequence[object]) -> object:
    """Leaves in plain dicts, and in lists where all steps of a container are positions; None for what is no leaf.

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
    return root.plain()


class _Node(dict[Any, Any]):
    """A container of leaves and other nodes, by the steps that lead to them."""

    are_positions = True

    def plain(self) -> Any:
        children = {part: child.plain() if isinstance(child, _Node) else child for part, child in self.items()}
        if not self or not self.are_positions:
            return children
        return [children.get(i) for i in range(max(children) + 1)]


def find(value: Any, path: Path) -> object:
    """What a nested value has at a path; raises KeyError if it has nothing there."""
    for step in path:
        try:
            value = value[step.part]
        except (TypeError, IndexError):  # the stored value has another structure
            raise KeyError(key_of(path)) from None
    return value
