"""The shards that the shares of an optimizer's state make of its arrays, kept from one snapshot to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datastates._base import gc_pause
from datastates._base.columns import I64
from datastates.providers.optimizer.shares import Share
from datastates.state.known_layout import Known
from datastates.state.shards import Shard


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """The shards that shares make of arrays.

    Attributes:
        whole: The arrays, each described as a whole.
        shards: The shards to save.
        index: For each shard, the number of its array.
    """

    whole: Sequence[Shard]
    shards: tuple[Shard, ...]
    index: I64

    @classmethod
    @gc_pause.paused()
    def of(cls, shares: Sequence[Share], found: Sequence[tuple[int, str, object]], whole: Sequence[Shard]) -> Spread:
        """Ask the shares for their shards.

        Args:
            shares: The shares.
            found: For each array, the number of its share, the name of its state, and the array.
            whole: For each array, its description as a whole.

        Raises:
            ProviderError: An array does not fit its share.
        """
        rows = [
            (i, shard)
            for i, ((number, state, _), described) in enumerate(zip(found, whole, strict=True))
            for shard in shares[number].shards(state, described)
        ]
        return cls(whole, tuple(shard for _, shard in rows), np.array([i for i, _ in rows], np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Knowledge:
    """The knowledge of a provider of shares, for the next provider object.

    Attributes:
        forms: The ``form`` of each share.
        arrays: The addresses and layouts of the arrays.
        spread: The shards that the shares made of the arrays.
    """

    forms: Sequence[object]
    arrays: Known
    spread: Spread | None
