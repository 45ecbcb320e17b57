"""Nested values as ``torch.save`` and PyTorch's trainers write them: the arrays in them by key, and the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from datastates.container.pickle_reader import Unbuilt
from datastates.state.keys import join
from datastates.state.shards import StoredArray


def arrays_in(value: object, prefix: str) -> Iterator[tuple[str, StoredArray]]:
    """The arrays in nested dicts, lists and tuples, by key, in their order.

    A container that is there several times, or in itself, is looked into once.

    Args:
        value: A value of which :class:`~datastates.state.shards.StoredArray` stands for each array.
        prefix: The key of the value; empty for the root.
    """
    left: list[tuple[str, Any]] = [(prefix, value)]
    seen: set[int] = set()
    while left:
        key, item = left.pop()
        if isinstance(item, StoredArray):
            yield key, item
        elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            pairs = item.items() if isinstance(item, dict) else enumerate(item)
            left += [(join(key, k), v) for k, v in reversed(list(pairs))]


def has_other(value: object) -> bool:
    """Whether there is anything beside arrays in nested dicts, lists and tuples; an empty one counts as that."""
    return any(not isinstance(leaf, StoredArray) for leaf in _leaves(value))


def is_built(value: object) -> bool:
    """Whether no object in nested dicts, lists and tuples was left unbuilt by a survey."""
    return not any(isinstance(leaf, Unbuilt) for leaf in _leaves(value))


def _leaves(value: object) -> Iterator[object]:
    """The values in nested dicts, lists and tuples, and those of these that are empty."""
    left: list[Any] = [value]
    seen: set[int] = set()
    while left:
        item = left.pop()
        if not isinstance(item, (dict, list, tuple)) or not item:
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            left += item.values() if isinstance(item, dict) else item
