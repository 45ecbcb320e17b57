"""What shares make of arrays that were described as wholes: done once, and known again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datastates._base import gc_pause
from datastates._base.columns import I64
from datastates.providers.optimizer.shares import Share
from datastates.state.repeated import Known
from datastates.state.shards import Shard


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """The shards of some arrays.

    Attributes:
        whole: The arrays as they were described.
        shards: What is saved of them.
        index: For each of those, the number of its array.
    """

    whole: Sequence[Shard]
    shards: tuple[Shard, ...]
    index: I64

    @classmethod
    @gc_pause.paused()
    def of(cls, shares: Sequence[Share], found: Sequence[tuple[int, str, object]], whole: Sequence[Shard]) -> Spread:
        """Ask the shares: for each array, ``found`` says the number of its share and the name of its state.

        Raises:
            ProviderError: An array is not of its share's form.
        """
        rows = [
            (i, shard)
            for i, ((number, state, _), described) in enumerate(zip(found, whole, strict=True))
            for shard in shares[number].shards(state, described)
        ]
        return cls(whole, tuple(shard for _, shard in rows), np.array([i for i, _ in rows], np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Knowledge:
    """What a provider of shares hands to another one.

    Attributes:
        forms: Of its shares.
        arrays: Where they lie.
        spread: What the shares made of them.
    """

    forms: Sequence[object]
    arrays: Known
    spread: Spread | None
