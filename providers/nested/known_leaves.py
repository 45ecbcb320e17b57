"""The leaves of a tree: what is stored of them, and how to describe a tree of the same form as last time quickly."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from datastates.errors import ProviderError
from datastates.providers.nested.skeleton import Skeleton
from datastates.providers.nested.taken_apart import PlainTree, is_plain
from datastates.state import arrays, jax_arrays
from datastates.state.jax_addresses import Renewed
from datastates.state.pytrees import Leaves, Path, Step, empty_in, flatten, key_of, leaves_of, nested
from datastates.state.replacements import describes, stand_in
from datastates.state.shards import Shard, Shards, object_shard

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


@dataclass(frozen=True, slots=True, eq=False)
class KnownLeaves:
    """The form of a tree of arrays, random keys, plain values and functions. It keeps no leaf alive.

    Attributes:
        form: The containers, and the paths to the leaves.
        static: Numbers of the leaves that are not stored.
        keys: By the number of a leaf that is an array of typed random keys: its class and element type, and the name of
            the random number generator.
        arrays: For each array of the skeleton, its number among the stored values.
        plain: For each plain value of the skeleton, its number among the stored values; None for a value that is no
            leaf.
        skeleton: The containers as they are stored.
        renewed: The description of the arrays.
        processes: The numbers of JAX's processes, which the shards depend on.
    """

    form: object
    static: frozenset[int]
    keys: dict[int, tuple[tuple[type, Any], str]]
    arrays: list[int]
    plain: list[int | None]
    skeleton: Skeleton
    renewed: Renewed
    processes: tuple[int, ...]

    @classmethod
    def of(cls, tree: object, skeleton: Skeleton, shards: Sequence[Shard]) -> KnownLeaves | None:
        """Remember the form of a tree that was just described.

        Args:
            tree: The tree.
            skeleton: The containers as they are stored.
            shards: The array shards, in the skeleton's order.

        Returns:
            The form; None if a tree of this form cannot be recognized.
        """
        flat = flatten(tree)
        if flat is None:
            return None
        paths, values = zip(*stored(leaves_of(tree)), strict=True)
        split = skeleton.strip(nested(paths, range(len(paths)), empty_in(tree)))
        assert split is not None
        numbers, plain = split
        renewed = Renewed.of([values[i] for i in numbers], shards)
        if renewed is None:
            return None
        leaves, form = flat
        static = frozenset(i for i, leaf in enumerate(leaves) if is_static(leaf))
        keys = {
            i: ((type(leaf), leaf.dtype), jax_arrays.key_name(leaf))
            for i, leaf in enumerate(leaves)
            if jax_arrays.is_key(leaf)
        }
        return cls(form, static, keys, numbers, plain, skeleton, renewed, jax_arrays.processes())

    def again(self, tree: object) -> Shards | None:
        """Describe a tree of the same form as shards, once its arrays are computed; None for a tree of another form."""
        flat = flatten(tree)
        if flat is None or not _same(flat[1], self.form) or jax_arrays.processes() != self.processes:
            return None
        found = self._stored(flat[0])
        if found is None:
            return None
        plain = [None if i is None else found[i] for i in self.plain]
        shards = self.renewed.again([found[i] for i in self.arrays]) if all(map(is_plain, plain)) else None
        if shards is None:
            return None
        no = [False] * len(self.arrays)
        return shards.but(objects=[object_shard(source=PlainTree(self.skeleton, no, no, plain))])

    def _stored(self, leaves: Sequence[Any]) -> Sequence[Any] | None:
        """The values to store for the leaves; None if a leaf is of another kind than before."""
        if not self.static and not self.keys:
            return leaves
        found: list[Any] = []
        for number, leaf in enumerate(leaves):
            if number in self.static:
                if not is_static(leaf):
                    return None
            elif number in self.keys:
                kind, name = self.keys[number]
                if (type(leaf), getattr(leaf, "dtype", None)) != kind or jax_arrays.is_gone(leaf):
                    return None
                found += [name, jax_arrays.key_data(leaf)]
            else:
                found.append(leaf)
        return found


def _same(form: object, other: object) -> bool:
    """Whether two trees have the same containers; False if they cannot be compared."""
    try:
        return form == other
    except Exception:  # the comparison of a container's class may raise anything
        return False
