"""Numbers on one side that are arrays without dimensions on the other, such as a compiled optimizer's step counter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from datastates.providers.nested.stored_leaves import is_array
from datastates.state import memory
from datastates.state.pytrees import Leaves, Path, find
from datastates.state.replacements import Landing, why_not_made
from datastates.state.shards import ArrayRef

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
