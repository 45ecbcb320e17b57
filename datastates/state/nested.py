"""Walks through nested dicts, lists and tuples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from datastates.state.keys import join

CONTAINERS = (dict, list, tuple)


def items(container: Any) -> Iterable[tuple[Any, Any]]:
    """Iterate over the items of a container with their names: a dict's keys, or numbers in a list or tuple."""
    return container.items() if isinstance(container, dict) else enumerate(container)


def leaves(value: object, key: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts, lists and tuples, in their order. An empty container is a leaf, too.

    A container that occurs several times, or inside itself, is looked into once.

    Args:
        value: The outermost container, or a leaf.
        key: Key of ``value``; empty for the root.

    Yields:
        The key and the value of each leaf.
    """
    left: list[tuple[str, Any]] = [(key, value)]
    seen: set[int] = set()
    while left:
        key, item = left.pop()
        if not isinstance(item, CONTAINERS) or not item:
            yield key, item
        elif id(item) not in seen:
            seen.add(id(item))
            left += [(join(key, k), v) for k, v in reversed(list(items(item)))]


def with_items(old: tuple[Any, ...], new: list[Any]) -> Any:
    """Make a tuple of the class of ``old`` with the items ``new``; returns ``old`` if it has the same items already."""
    if all(a is b for a, b in zip(old, new, strict=True)):
        return old
    try:
        return tuple.__new__(type(old), new)
    except TypeError:  # torch.Size and time.struct_time are made by their own classes only
        return type(old)(new)
