"""A provider whose arrays are the same on several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from datastates._base.loaded import loaded
from datastates.errors import ProviderError
from datastates.state import jax_arrays
from datastates.state.provider import Encoder, Saved, StateProvider
from datastates.state.shards import EVERY_RANK, Shard, Shards


@dataclass(frozen=True, slots=True, eq=False)
class _Marked:
    """The shards of a layout, each marked with the ranks that hold the same array."""

    layout: tuple[Shard, ...]
    ranks: tuple[int, ...]
    shards: tuple[Shard, ...]


class ReplicatedProvider(StateProvider):
    """Another provider's state that is the same on several ranks, as under data parallelism.

    One rank writes each array, and every rank gets it back. The ranks compare digests of what they hold: if two differ,
    the snapshot fails and names key and ranks. Lazy arrays are shared out among the ranks. All other arrays are written
    by the lowest rank. Each rank saves its own objects.
    """

    def __init__(self, provider: StateProvider, ranks: Sequence[int] | None = None, *, compare: bool = True) -> None:
        """Wrap a provider and take its name.

        Args:
            provider: The state.
            ranks: Global numbers of the ranks that hold the same arrays, this rank among them. None: all ranks of
                torch.distributed at each snapshot; without torch.distributed, all processes of JAX; without either,
                all ranks that save together.
            compare: False: the arrays may differ, and those of the lowest rank are right for all, as in a
                DistributedDataParallel that lets each rank keep statistics of its own data. It also holds for arrays of
                which the wrapped provider says by itself that several ranks hold them, as for plain tensors beside
                DTensors. Parts of DTensors stay parts.

        Raises:
            TypeError: ``provider`` is no :class:`~datastates.protocol.StateProvider`.
            ValueError: ``provider`` is ``per_rank``, or a rank occurs twice or is negative.
        """
        if not isinstance(provider, StateProvider):
            raise TypeError(f"a {type(provider).__name__} is no StateProvider")
        super().__init__(provider.name)
        if provider.per_rank:
            raise ValueError(f"{provider.name!r} is state of each rank (per_rank), and cannot be alike on several")
        if ranks is not None and (len(set(ranks)) != len(ranks) or min(ranks, default=-1) < 0):
            raise ValueError(f"{provider.name!r}: ranks are distinct numbers from 0, not {list(ranks)}")
        self._provider = provider
        self.takes_parts = provider.takes_parts
        self._ranks = None if ranks is None else tuple(sorted(ranks))
        self._compare = compare
        self._marked: _Marked | None = None

    def knowledge(self) -> object:
        """The knowledge of the wrapped provider, and the marked shards."""
        inner = self._provider.knowledge()
        return None if inner is None else (type(self._provider), inner, self._said(), self._marked)

    def learn(self, knowledge: object) -> None:
        """Take the knowledge of an earlier provider, and its marked shards if it was given the same ranks."""
        assert isinstance(knowledge, tuple)
        kind, inner, said, marked = knowledge
        if kind is type(self._provider):
            self._provider.learn(inner)
            self._marked = marked if said == self._said() else None

    def stepped(self) -> Iterable[object]:
        """The parameters that the wrapped provider's optimizer changes."""
        return self._provider.stepped()

    def stand_beside(self, providers: Sequence[StateProvider]) -> None:
        """Tell the wrapped provider which providers take part in a snapshot."""
        self._provider.stand_beside(providers)

    def _said(self) -> object:
        """The arguments that the marks depend on. They also depend on the shards and the present ranks."""
        return self._ranks, self._compare

    def shards(self) -> Sequence[Shard]:
        """The provider's shards, its arrays marked; raises ProviderError if this rank is not among the ranks."""
        shards, ranks = self._provider.shards(), self._current_ranks()
        if not isinstance(shards, Shards):
            return [shard if shard.is_object else self._mark(shard, ranks) for shard in shards]
        marked = self._marked
        if marked is None or marked.layout is not shards.layout or marked.ranks != ranks:
            marked = _Marked(shards.layout, ranks, tuple(self._mark(shard, ranks) for shard in shards.layout))
            self._marked = marked
        return shards.but(layout=marked.shards)

    def _current_ranks(self) -> tuple[int, ...]:
        """The ranks that hold the arrays, ascending; empty if a framework says that there is only this one."""
        torch = loaded("torch")
        together = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
        ranks = self._ranks
        if ranks is None:
            everybody = tuple(range(torch.distributed.get_world_size())) if together else jax_arrays.processes()
            ranks = everybody or EVERY_RANK
        elif together and torch.distributed.get_rank() not in ranks:
            raise ProviderError(
                f"rank {torch.distributed.get_rank()} is none of the ranks that were said to hold this state: {ranks}"
            )
        return ranks if len(ranks) > 1 or ranks == EVERY_RANK else ()

    def _is_replicated(self, key: str) -> bool:
        del key
        return True

    def _is_compared(self, key: str) -> bool:
        del key
        return self._compare

    def _mark(self, shard: Shard, ranks: tuple[int, ...]) -> Shard:
        if not self._is_replicated(shard.key):
            return shard
        if not self._is_compared(shard.key):
            is_part = not shard.replicas and shard.shape != shard.global_shape
            own = () if is_part else shard.replicas or ranks
            lowest = 0 if own == EVERY_RANK else min(own, default=None)
            return replace(shard, replicas=own, owner=lowest, compared=False)
        if shard.replicas == ranks:
            return shard
        if shard.replicas:
            raise ProviderError(
                f"{shard.key!r}: the provider by itself says that ranks {shard.replicas} hold it alike, "
                f"and ReplicatedProvider was told {ranks}"
            )
        if self._ranks is None and shard.shape != shard.global_shape:
            raise ProviderError(f"{shard.key!r} is a part of a tensor: say which ranks hold that part alike")
        return replace(shard, replicas=ranks)

    def serialize(self, shard: Shard) -> bytes | Encoder:
        """Let the provider serialize its object."""
        return self._provider.serialize(shard)

    def destinations(self, saved: Saved) -> Sequence[Shard]:
        """The provider's destinations: every rank restores all arrays."""
        return self._provider.destinations(saved)

    def restore(self, shard: Shard, value: object) -> None:
        """Hand the object to the provider."""
        self._provider.restore(shard, value)

    def arrays_by_name(self, saved: Saved) -> Sequence[Shard]:
        """The provider's arrays: every rank restores all of them."""
        return self._provider.arrays_by_name(saved)

    def take_arrays(self, shards: Sequence[Shard], saved: Saved) -> None:
        """Hand the arrays to the provider."""
        self._provider.take_arrays(shards, saved)
