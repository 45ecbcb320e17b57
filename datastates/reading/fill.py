"""Replaces references to arrays by arrays, in an object that was read before its arrays."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from datastates.state import memory, subclasses
from datastates.state.nested import items
from datastates.state.shards import ArrayRef

_PLAIN = {int, float, str, bool, type(None)}


def fill(value: object, array: Callable[[ArrayRef], object]) -> bool:
    """Replace the references in nested dicts and lists, in place.

    Args:
        value: The outermost dict or list.
        array: Returns the array for a reference.

    Returns:
        False if a value is of another class: the object must be built in another way. Some references may have been
        replaced by then.
    """
    left = [value]
    seen: set[int] = set()
    made: dict[int, tuple[ArrayRef, object]] = {}  # by id of the reference: one reference becomes one array
    while left:
        container: Any = left.pop()
        if type(container) not in (dict, OrderedDict, list):
            return False
        if id(container) in seen:
            continue
        seen.add(id(container))
        if type(container) is OrderedDict and vars(container):
            left.append(vars(container))
        for k, item in items(container):
            if type(item) is ArrayRef:
                if id(item) not in made:
                    made[id(item)] = item, array(item)
                container[k] = made[id(item)][1]
            elif type(item) not in _PLAIN and not (type(item) is tuple and set(map(type, item)) <= _PLAIN):
                left.append(item)
    return True


def as_referred(array: Any, ref: ArrayRef) -> Any:
    """Make an array a parameter, or require a gradient, as its reference says."""
    if ref.parameter and subclasses.is_tensor(array):
        return subclasses.as_parameter(array, ref.requires_grad)
    return array if getattr(array, "requires_grad", True) else memory.with_grad(array, ref.requires_grad)
