"""The leaves of a tree as they were at the last snapshot, to describe a tree of the same form quickly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datastates.providers.nested.skeleton import Skeleton
from datastates.providers.nested.stored_leaves import is_static, stored
from datastates.providers.nested.taken_apart import PlainTree, is_plain
from datastates.state import jax_arrays
from datastates.state.jax_addresses import Renewed
from datastates.state.pytrees import empty_in, flatten, leaves_of, nested
from datastates.state.shards import Shard, Shards, object_shard


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
