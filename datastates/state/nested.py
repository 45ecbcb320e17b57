"""Walks through nested dicts, lists and tuples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from datastates.state.keys import join

CONTAINERS = (dict, list, tuple)


def items(container: Any) -> Iterable[tuple[Any, Any]]:
    """The items of a dict by their keys, or those of a list or tuple by their numbers."""
    return container.items() if isinstance(container, dict) else enumerate(container)


def leaves(value: object, key: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts, lists and tuples, in their order. An empty container is a leaf, too.

    A container that is there several times, or in itself, is looked into once.

    Args:
        value: The outermost container, or a leaf.
        key: Its key; empty for the root.
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
    """A tuple of the same class with as many other items; the old one if they are its own."""
    if all(a is b for a, b in zip(old, new, strict=True)):
        return old
    try:
        return tuple.__new__(type(old), new)
    except TypeError:  # torch.Size and time.struct_time are made by their own classes only
        return type(old)(new)
