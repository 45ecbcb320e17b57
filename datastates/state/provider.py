"""What state providers are asked, and what they are given back: :class:`StateProvider`, :class:`Saved`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from datastates.state.shards import ArrayLeaf, ArrayRef, Shard, StoredArray

Encoder: TypeAlias = Callable[[Callable[[ArrayLeaf], StoredArray]], bytes]
"""Finishes a serialization, given where the provider's array shards are stored."""


class Saved(ABC):
    """What a checkpoint holds for one provider; handed to :meth:`StateProvider.destinations`."""

    strict: bool
    """Whether the caller wants every difference refused; the engine does that, from what is reported."""

    @abstractmethod
    def arrays(self) -> Mapping[str, ArrayRef]:
        """The stored arrays by their key within the provider, each a logical tensor.

        Of a checkpoint of several ranks, those are listed that the rank of this number had; all others are found by
        their keys as well.
        """

    @abstractmethod
    def every_key(self) -> Sequence[str]:
        """Keys of all stored arrays, whichever rank had them. Of many ranks this takes long."""

    @abstractmethod
    def objects(self) -> Sequence[str]:
        """Keys of the stored objects."""

    @abstractmethod
    def report(
        self,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, str] | None = None,
    ) -> None:
        """Say, by key, what only the live state has, what only the checkpoint has, and what differs and how."""

    @abstractmethod
    def structure(self, key: str) -> object:
        """A stored object's containers and plain values, with an :class:`ArrayRef` for each array.

        An object of another class is left unbuilt: :class:`datastates.container.pickle_reader.Unbuilt` stands for it.

        Raises:
            TrustError: It needs a class that the caller has not trusted.
            CorruptError: Its bytes do not match their checksum.
        """


class StateProvider(ABC):
    """One piece of training state: what to keep, and how to take it back.

    Subclass it, name your shards in :meth:`shards`, and handle your objects in :meth:`serialize` and :meth:`restore`;
    ``datastates.testing.ProviderTests`` checks a subclass. All methods are called on the thread that calls
    ``snapshot()`` or ``restore()``, but :meth:`serialize` of a lazy object shard, and the callable that
    :meth:`serialize` may return, run on the engine's own thread.
    """

    per_rank: bool = False
    """Whether the state belongs to the rank rather than to the model: each rank's is kept apart, under its number."""

    def __init__(self, name: str) -> None:
        """Name the provider; names are unique within a checkpoint and become the top-level keys of its ``data.pkl``."""
        if not isinstance(name, str):
            raise TypeError(f"a provider's name is a string, not {type(name).__name__}")
        self.name = name

    @abstractmethod
    def shards(self) -> Sequence[Shard]:
        """Describe the state and copy nothing: sources on save, destinations on restore.

        Each Shard names its key, dtype, global shape, this process's part of it, and nbytes (None: known only
        after serializing).
        REQUIRES on save: a shard marked lazy stays unchanged until Snapshot.captured.
        """

    def knowledge(self) -> object:
        """What :meth:`shards` has found out about the form of the state, for :meth:`learn`; None for nothing.

        The engine keeps it from one snapshot to the next, so it holds no arrays and nothing that holds them.
        """
        return None

    def learn(self, knowledge: object) -> None:
        """Take the :meth:`knowledge` of the provider that had this class and name in the last snapshot.

        It spares a new provider object the work of describing a known state. The state may be another one: what was
        learned is compared with the state before it is used. Called before :meth:`shards`, on a provider that knows
        nothing yet.
        """
        del knowledge

    def serialize(self, shard: Shard) -> bytes | Encoder:
        """Serialize one object shard with :func:`datastates.dumps`.

        Called inside ``snapshot()``, or in the background when the shard is lazy. What is expensive and no longer
        depends on live state may be left to a returned callable, which runs in the background; it is given a function
        that says where an array shard of this provider is stored, for objects that refer to arrays.
        """
        raise NotImplementedError(f"{type(self).__name__} has object shards but no serialize()")

    def destinations(self, saved: Saved) -> Sequence[Shard]:
        """The shards to restore into, in sight of what the checkpoint holds; by default those of :meth:`shards`.

        Override it where the state decides by what was saved (an optimizer that has no state yet). Differences are
        reported to ``saved``, and only shards that it holds are returned; shapes and dtypes are compared by the engine.
        """
        shards = self.shards()
        known = {*saved.arrays(), *saved.objects()}
        wanted = [shard.key for shard in shards]
        saved.report(missing=[k for k in wanted if k not in known], unexpected=sorted(known.difference(wanted)))
        return [shard for shard in shards if shard.key in known]

    def restore(self, shard: Shard, value: object) -> None:
        """Take one object shard back; arrays are in place by then.

        ``shard`` is the one that :meth:`destinations` gave; ``value`` what :func:`datastates.dumps` was given in
        :meth:`serialize`.
        """
        raise NotImplementedError(f"{type(self).__name__} has object shards but no restore()")


def walk_unique(providers: Sequence[StateProvider]) -> Iterator[StateProvider]:
    """The providers, each checked to be one and to have a name of its own; raises TypeError or ValueError."""
    seen: set[str] = set()
    if isinstance(providers, (Mapping, str, StateProvider)) or not isinstance(providers, Iterable):
        raise TypeError(f"providers: a list of StateProviders is wanted, not a {type(providers).__name__}")
    for provider in providers:
        if not isinstance(provider, StateProvider) or not hasattr(provider, "name"):
            raise TypeError(
                f"providers: a {type(provider).__name__} is no StateProvider with a name; "
                "wrap state by from_stateful(name, obj) or from_state_dict(name, mapping)"
            )
        if provider.name in seen:
            raise ValueError(f"two providers are named {provider.name!r}")
        seen.add(provider.name)
        yield provider
