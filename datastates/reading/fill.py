"""Puts arrays in the place of the references in an object that was read before them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from datastates.state import memory, subclasses
from datastates.state.nested import items
from datastates.state.shards import ArrayRef

_PLAIN = {int, float, str, bool, type(None)}


def fill(value: object, array: Callable[[ArrayRef], object]) -> bool:
    """Replace the references in a dict or list, and in those within it; False if it holds other kinds of values.

    Args:
        value: What is filled. After False, some of its references may have been replaced.
        array: Returns the array for a reference.
    """
    left = [value]
    seen: set[int] = set()
    made: dict[int, tuple[ArrayRef, object]] = {}  # by id of the reference, so that one reference becomes one array
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
    """An array as a reference has it: as a parameter, or requiring a gradient."""
    if ref.parameter and subclasses.is_tensor(array):
        return subclasses.as_parameter(array, ref.requires_grad)
    return array if getattr(array, "requires_grad", True) else memory.with_grad(array, ref.requires_grad)
