"""Tensors in pickles that consist of other tensors, such as torchao's quantized weights: the arrays inside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from datastates.container.unbuilt import Unbuilt
from datastates.state.keys import join
from datastates.state.nested import leaves
from datastates.state.shards import StoredArray


@dataclass(frozen=True, slots=True, eq=False)
class Composed:
    """A tensor that consists of others, as it stands in a pickle.

    Attributes:
        stand: Stands for the tensor, which is not built.
        arrays: The arrays in its attributes, by full key.
    """

    stand: Unbuilt
    arrays: Mapping[str, StoredArray]


def arrays_inside(stand: Unbuilt) -> Iterator[tuple[str, StoredArray]]:
    """Yield the arrays in the attributes of a tensor, and of tensors among them, each with its path."""
    left: list[tuple[str, Unbuilt]] = [("", stand)]
    seen: set[int] = set()
    while left:
        path, one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for name, item in (one.attributes or {}).items():
            for key, leaf in leaves(item, join(path, name)):
                if isinstance(leaf, StoredArray):
                    yield key, leaf
                elif isinstance(leaf, Unbuilt):
                    left.append((key, leaf))
