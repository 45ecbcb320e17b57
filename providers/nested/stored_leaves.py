"""Chooses the values to store for the leaves of a tree: arrays, numbers of random keys, other values, no functions."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from datastates.errors import ProviderError
from datastates.state import arrays, jax_arrays
from datastates.state.pytrees import Leaves, Path, Step, empty_in, key_of, leaves_of, nested
from datastates.state.replacements import describes, stand_in

KEY_DATA = Step("key_data", False)
"""Last step of the path to the array of numbers under typed random keys."""
KEY_NAME = Step("impl", False)
"""Last step of the path to the name of the random number generator of typed random keys."""


_OF_FUNCTIONS = ("builtins", "functools", "operator", "types", "typing", "jax", "jaxlib")
"""Packages whose callable objects are functions, or are made of functions."""
_FUNCTIONS = (
    "numpy.ufunc",
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
    "torch.jit.torch.jit.ScriptFunction",
)
"""Classes of functions in other packages."""


def is_array(leaf: object) -> bool:
    """Whether a leaf is an array, or a ``jax.ShapeDtypeStruct``, which describes one."""
    return arrays.kind_of(leaf) is not None or describes(leaf)


def is_static(leaf: object) -> bool:
    """Whether a leaf belongs to the program, such as the activation function in a module of equinox.

    Functions and classes do, and objects that Python, NumPy, JAX and torch make of functions: methods, partials, jitted
    functions. Other callable objects, such as models, have a state of their own.
    """
    if is_array(leaf) or not callable(leaf):
        return False
    if isinstance(leaf, functools.partial):
        inner = leaves_of([leaf.func, leaf.args, leaf.keywords]).values
        return not any(is_array(one) or (callable(one) and not is_static(one)) for one in inner)
    kind = type(leaf)
    if isinstance(leaf, type) or kind.__module__.partition(".")[0] in _OF_FUNCTIONS or _name(kind) in _FUNCTIONS:
        return True
    wrapped = getattr(leaf, "__dict__", {}).get("__wrapped__")  # as functools.wraps leaves it
    return wrapped is not None and is_static(wrapped)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def taken_apart(tree: object) -> Leaves:
    """Take a tree apart into its leaves, and refuse leaves whose contents would be lost.

    Raises:
        ProviderError: A leaf is callable but no function: its contents would not be saved. The message names it.
    """
    leaves = leaves_of(tree)
    refuse_callable(leaves)
    return leaves


def refuse_callable(leaves: Leaves) -> None:
    """Refuse leaves whose contents would be lost; raises as :func:`taken_apart` does."""
    for path, leaf in zip(leaves.paths, leaves.values, strict=True):
        if callable(leaf) and not is_array(leaf) and not is_static(leaf):
            raise ProviderError(
                f"{key_of(path)!r} is an object of {_name(type(leaf))} that can be called, and no function: what it "
                "holds would not be saved. Put its arrays in its place, or register its class as a pytree; keep what "
                "belongs to the program out of the tree"
            )


def stored(leaves: Leaves) -> Iterator[tuple[Path, Any]]:
    """Yield the values to store, each with its path. Typed random keys are two values: a name, numbers."""
    for path, leaf in zip(leaves.paths, leaves.values, strict=True):
        if jax_arrays.is_key(leaf):
            yield (*path, KEY_NAME), jax_arrays.key_name(leaf)
            yield (*path, KEY_DATA), jax_arrays.key_data(leaf)
        elif not is_static(leaf):
            yield path, leaf


def contents_of(tree: object, leaves: Leaves) -> object:
    """Nest the values to store of a tree in plain containers, with the tree's empty containers.

    Args:
        tree: The tree.
        leaves: Its leaves.
    """
    pairs = list(stored(leaves))
    return nested([path for path, _ in pairs], [value for _, value in pairs], empty_in(tree))


def nested_leaves(leaves: Leaves, stands: dict[int, tuple[object, object]]) -> object:
    """Nest the values to compare with stored ones in plain containers. Empty containers are left out.

    Args:
        leaves: The tree's leaves.
        stands: An array of one element's memory stands for each ``jax.ShapeDtypeStruct``. ``stands`` gets both, by the
            id of the array.
    """
    paths: list[Path] = []
    values: list[object] = []
    for path, value in stored(leaves):
        paths.append(path)
        if describes(value):
            stand = stand_in(value)
            stands[id(stand)] = stand, value
            values.append(stand)
        else:
            values.append(value)
    return nested(paths, values)
