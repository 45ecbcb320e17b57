"""Nested values as ``torch.save`` and PyTorch's trainers write them: the arrays in them by key, and the rest."""

from __future__ import annotations

from collections.abc import Iterator

from datastates.container.pickle_reader import Unbuilt
from datastates.state.nested import leaves
from datastates.state.shards import StoredArray


def arrays_in(value: object, prefix: str) -> Iterator[tuple[str, StoredArray]]:
    """The arrays in nested dicts, lists and tuples, by key, in their order; see :func:`datastates.state.nested.leaves`.

    Args:
        value: A value of which :class:`~datastates.state.shards.StoredArray` stands for each array.
        prefix: The key of the value; empty for the root.
    """
    return ((key, leaf) for key, leaf in leaves(value, prefix) if isinstance(leaf, StoredArray))


def has_other(value: object) -> bool:
    """Whether there is anything beside arrays in nested dicts, lists and tuples; an empty one counts as that."""
    return any(not isinstance(leaf, StoredArray) for _, leaf in leaves(value))


def is_built(value: object) -> bool:
    """Whether no object in nested dicts, lists and tuples was left unbuilt by a survey."""
    return not any(isinstance(leaf, Unbuilt) for _, leaf in leaves(value))
