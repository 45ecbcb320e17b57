"""What is stored of the leaves of a tree: arrays, the numbers of random keys, and values, but no functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from datastates.state import arrays, jax_arrays
from datastates.state.landings import describes, stand_in
from datastates.state.pytrees import Leaves, Path, Step, nested

KEY_DATA = Step("key_data", False)
"""Leads from typed random keys to their numbers."""
KEY_NAME = Step("impl", False)
"""Leads from typed random keys to the name of their implementation."""


def is_array(leaf: object) -> bool:
    """Whether a leaf is an array, or describes one."""
    return arrays.kind_of(leaf) is not None or describes(leaf)


def is_static(leaf: object) -> bool:
    """Whether a leaf belongs to the program, such as the activation function that a module of equinox has."""
    return callable(leaf) and not is_array(leaf)


def stored(leaves: Leaves) -> Iterator[tuple[Path, Any]]:
    """What is stored, with the way to it. The numbers of typed random keys lie beside their implementation's name."""
    for path, leaf in zip(leaves.paths, leaves.values, strict=True):
        if jax_arrays.is_key(leaf):
            yield (*path, KEY_NAME), jax_arrays.key_name(leaf)
            yield (*path, KEY_DATA), jax_arrays.key_data(leaf)
        elif not is_static(leaf):
            yield path, leaf


def nested_leaves(leaves: Leaves, stands: dict[int, tuple[object, object]] | None = None) -> object:
    """What is stored, in plain containers.

    Args:
        leaves: The tree.
        stands: Gets what describes an array, which an array without memory of its own then stands for: both by the id
            of the latter.
    """
    paths: list[Path] = []
    values: list[object] = []
    for path, value in stored(leaves):
        paths.append(path)
        if stands is not None and describes(value):
            stand = stand_in(value)
            stands[id(stand)] = stand, value
            values.append(stand)
        else:
            values.append(value)
    return nested(paths, values)
