"""A provider whose arrays are alike on several ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from datastates.errors import ProviderError
from datastates.state.provider import Encoder, Saved, StateProvider
from datastates.state.shards import Shard, Shards


@dataclass(frozen=True, slots=True, eq=False)
class _Marked:
    """The shards of a layout, marked as alike on those ranks."""

    layout: tuple[Shard, ...]
    ranks: tuple[int, ...]
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Knowledge:
    kind: type[StateProvider]
    inner: object
    said: object
    marked: _Marked | None


class ReplicatedProvider(StateProvider):
    """Another provider's state, said to be alike on several ranks, as under data parallelism.

    Each array is written by one of them. Nobody compares the arrays: what that rank holds is what all get back.
    Objects are kept for each rank.
    """

    def __init__(self, provider: StateProvider, ranks: Sequence[int] | None = None) -> None:
        """Take the provider, and its name.

        Args:
            provider: The state.
            ranks: Who holds it alike, this rank among them, by their global numbers. None: all ranks of
                torch.distributed at the time of a snapshot; without torch.distributed there is only this one.

        Raises:
            TypeError: It is no provider.
            ValueError: Its state belongs to each rank, or a rank occurs twice or is negative.
        """
        if not isinstance(provider, StateProvider):
            raise TypeError(f"a {type(provider).__name__} is no StateProvider")
        super().__init__(provider.name)
        if provider.per_rank:
            raise ValueError(f"{provider.name!r} is state of each rank for itself, and cannot be alike on several")
        if ranks is not None and (len(set(ranks)) != len(ranks) or min(ranks, default=-1) < 0):
            raise ValueError(f"{provider.name!r}: ranks are distinct numbers from 0, not {list(ranks)}")
        self._provider = provider
        self._ranks = None if ranks is None else tuple(sorted(ranks))
        self._marked: _Marked | None = None

    def knowledge(self) -> object:
        """What the provider in it knows, and its arrays as they were marked."""
        inner = self._provider.knowledge()
        return None if inner is None else _Knowledge(type(self._provider), inner, self._said(), self._marked)

    def learn(self, knowledge: object) -> None:
        """Take it; what was marked is of use where the same was said."""
        assert isinstance(knowledge, _Knowledge)
        if knowledge.kind is type(self._provider):
            self._provider.learn(knowledge.inner)
            self._marked = knowledge.marked if knowledge.said == self._said() else None

    def _said(self) -> object:
        """What the marks depend on, beside the shards and the ranks."""
        return self._ranks

    def shards(self) -> Sequence[Shard]:
        """The provider's, its arrays marked; raises ProviderError when this is none of the ranks."""
        shards, ranks = self._provider.shards(), self._current_ranks()
        if not isinstance(shards, Shards):
            return [shard if shard.is_object else self._mark(shard, ranks) for shard in shards]
        marked = self._marked
        if marked is None or marked.layout is not shards.layout or marked.ranks != ranks:
            marked = _Marked(shards.layout, ranks, tuple(self._mark(shard, ranks) for shard in shards.layout))
            self._marked = marked
        return Shards(marked.shards, shards.sources, shards.objects, versions=shards.versions, memory=shards.memory)

    def _current_ranks(self) -> tuple[int, ...]:
        """The ranks as shards name them: none where there is no other."""
        torch: Any = sys.modules.get("torch")
        together = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
        ranks = self._ranks
        if ranks is None:
            ranks = tuple(range(torch.distributed.get_world_size())) if together else ()
        elif together and torch.distributed.get_rank() not in ranks:
            raise ProviderError(
                f"rank {torch.distributed.get_rank()} is none of those said to hold this state, {ranks}"
            )
        return ranks if len(ranks) > 1 else ()

    def _is_replicated(self, key: str) -> bool:
        del key
        return True

    def _mark(self, shard: Shard, ranks: tuple[int, ...]) -> Shard:
        if not self._is_replicated(shard.key) or shard.replicas == ranks:
            return shard
        if shard.replicas:
            raise ProviderError(
                f"{shard.key!r} is alike on ranks {shard.replicas} by itself, and on {ranks} as was said"
            )
        if self._ranks is None and shard.shape != shard.global_shape:
            raise ProviderError(f"{shard.key!r} is a part of a tensor: say which ranks hold that part alike")
        return replace(shard, replicas=ranks)

    def serialize(self, shard: Shard) -> bytes | Encoder:
        """Ask the provider."""
        return self._provider.serialize(shard)

    def destinations(self, saved: Saved) -> Sequence[Shard]:
        """The provider's; each rank takes back what all hold."""
        return self._provider.destinations(saved)

    def restore(self, shard: Shard, value: object) -> None:
        """Hand it to the provider."""
        self._provider.restore(shard, value)
