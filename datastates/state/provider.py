"""The interface of state providers: :class:`StateProvider`, and :class:`Saved`, which they restore from."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from datastates.state.shards import ArrayLeaf, ArrayRef, Shard, StoredArray

Encoder: TypeAlias = Callable[[Callable[[ArrayLeaf], StoredArray]], bytes]
"""Finishes a serialization in the background, and returns bytes as :func:`datastates.dumps` writes them.

The argument is a function that says where an array shard of the provider is stored; ``dumps`` takes it as ``locate``.
"""


class Saved(ABC):
    """The arrays and objects that a checkpoint holds for one provider; passed to :meth:`StateProvider.destinations`.

    Keys are keys of shards within the provider. Used on the thread that calls ``restore()``.
    """

    strict: bool
    """Whether the caller of ``restore()`` refuses all differences. The engine raises the error for reported ones."""

    ranks: int
    """The number of ranks that saved the checkpoint."""

    @abstractmethod
    def arrays(self) -> Mapping[str, ArrayRef]:
        """The stored arrays by key, each as its whole logical tensor.

        In a checkpoint of several ranks, iteration and ``len`` cover the arrays of one rank: the rank with this rank's
        number or, if it saved nothing of this provider, another rank. A look-up by key finds the arrays of all ranks.
        """

    @abstractmethod
    def every_key(self) -> Sequence[str]:
        """Keys of the stored arrays of all ranks. This is slow for many ranks."""

    @abstractmethod
    def sharing(self, keys: Sequence[str]) -> Sequence[Mapping[str, int]]:
        """Tell which stored arrays share memory, as views of one buffer do.

        Args:
            keys: The keys of the arrays to look at.

        Returns:
            For each memory that several of these arrays share: where each begins in it, in bytes. Arrays of which no
            rank saved all elements as one part are not among them.
        """

    @abstractmethod
    def objects(self) -> Sequence[str]:
        """Keys of the stored objects."""

    def composed(self) -> Mapping[str, Sequence[str]]:
        """The stored tensors that :meth:`built` can make of others, where arrays are found by name.

        Returns:
            For each tensor, by its key, the keys of the arrays that it consists of.
        """
        return {}

    def kind(self, key: str) -> str:
        """The name of the class of one of :meth:`composed`."""
        raise KeyError(key)

    def built(self, arrays: Mapping[str, object]) -> Mapping[str, Any]:
        """Build those of :meth:`composed` all of whose arrays are given, with their contents, by key."""
        del arrays
        return {}

    @abstractmethod
    def report(
        self,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, str] | None = None,
    ) -> None:
        """Report differences between the live state and the checkpoint. Several calls add up.

        Args:
            missing: Keys that only the live state has.
            unexpected: Keys that only the checkpoint has.
            mismatched: For each key that differs, a sentence that says how.
        """

    @abstractmethod
    def restored_keys(self) -> Collection[str]:
        """Keys of the destinations that have been restored. Known only when :meth:`StateProvider.restore` is called."""

    @abstractmethod
    def structure(self, key: str) -> object:
        """Read a stored object's containers and plain values, with an :class:`ArrayRef` for each array.

        Objects of other classes are not built: :class:`datastates.container.unbuilt.Unbuilt` stands for each.

        Args:
            key: One of :meth:`objects`.

        Raises:
            TrustError: The object needs a class that the caller does not trust.
            CorruptError: The object's bytes do not match their checksum.
            FormatError: The object cannot be decoded.
        """

    @abstractmethod
    def structures_beside(self, key: str, arrays: Sequence[str]) -> Iterator[object]:
        """Read an object as :meth:`structure` does, from each other rank that saved one of the arrays, in order.

        Args:
            key: The object's key. Ranks without such an object are left out.
            arrays: Keys of stored arrays.

        Raises:
            TrustError, CorruptError, FormatError: See :meth:`structure`.
        """


class StateProvider(ABC):
    """One piece of training state: describes the arrays and objects to save, and restores them.

    A subclass describes its shards in :meth:`shards`, and handles its objects in :meth:`serialize` and :meth:`restore`.
    ``datastates.testing.ProviderTests`` checks a subclass.

    The methods are called on the thread that calls ``snapshot()`` or ``restore()``, with two exceptions, which run on a
    background thread: :meth:`serialize` of a lazy object shard, and the callable that :meth:`serialize` may return.
    """

    per_rank: bool = False
    """Whether the state belongs to the rank, not to the model. If so, each rank's state is stored under its number."""

    takes_parts: bool = False
    """Whether ``restore(keys=...)`` may select some of the provider's keys. Other keys are then no destinations, and
    :meth:`restore` gets an :class:`ArrayRef` for each value that is not selected."""

    def __init__(self, name: str) -> None:
        """Name the provider.

        Args:
            name: Unique within a checkpoint. It becomes a top-level key of ``data.pkl``.

        Raises:
            TypeError: The name is not a string.
        """
        if not isinstance(name, str):
            raise TypeError(f"a provider's name is a string, not {type(name).__name__}")
        self.name = name

    @abstractmethod
    def shards(self) -> Sequence[Shard]:
        """Describe the state without copying it: the sources of a save, or the destinations of a restore.

        It is called at every ``snapshot()`` and, by the default :meth:`destinations`, at every ``restore()``. A lazy
        shard must stay unchanged until ``Snapshot.captured``, except by an update that waits for the gate.

        Returns:
            The shards. No two object shards may have the same key, and no two array shards but for parts of one tensor
            that do not overlap. An object may not have an array's key, and an object with the empty key allows no other
            object.
        """

    def knowledge(self) -> object:
        """Findings of :meth:`shards` about the form of the state, for :meth:`learn`; None if there are none.

        The engine keeps them from one snapshot to the next. They must not hold arrays, nor anything that holds arrays.
        """
        return None

    def learn(self, knowledge: object) -> None:
        """Take the :meth:`knowledge` of the provider that had this class and name in the last snapshot.

        It saves a new provider object the work of describing a state that is already known. The state may have changed,
        so :meth:`shards` must compare the knowledge with the state before using it. The engine calls this before
        :meth:`shards`, on a provider whose own knowledge is None.
        """
        del knowledge

    def stepped(self) -> Iterable[object]:
        """The parameters that an optimizer of this provider changes in its ``step()``, which waits for the gate."""
        return ()

    def stand_beside(self, providers: Sequence[StateProvider]) -> None:
        """Learn which providers take part in a snapshot; the engine calls it before :meth:`shards`."""
        del providers

    def serialize(self, shard: Shard) -> bytes | Encoder:
        """Serialize one object shard with :func:`datastates.dumps`.

        It is called inside ``snapshot()``, or in the background if the shard is lazy.

        Args:
            shard: One of the object shards that :meth:`shards` returned.

        Returns:
            The bytes from :func:`datastates.dumps`, or an :data:`Encoder`. An encoder runs in the background. It does
            work that no longer depends on live state, and it can write references to the provider's array shards.
        """
        raise NotImplementedError(f"{type(self).__name__} has object shards but no serialize()")

    def destinations(self, saved: Saved) -> Sequence[Shard]:
        """Describe the shards to restore into; by default the shards of :meth:`shards`.

        Override it if the destinations depend on the checkpoint, as for an optimizer that has no state yet. The engine
        compares shapes and dtypes.

        Args:
            saved: The arrays and objects that the checkpoint holds. Differences in keys must be reported to it.

        Returns:
            The shards that the checkpoint holds.
        """
        shards = self.shards()
        known = {*saved.arrays(), *saved.objects()}
        wanted = [shard.key for shard in shards]
        saved.report(missing=[k for k in wanted if k not in known], unexpected=sorted(known.difference(wanted)))
        return [shard for shard in shards if shard.key in known]

    def restore(self, shard: Shard, value: object) -> None:
        """Restore one object shard. It is called after all arrays have been restored.

        Args:
            shard: An object shard that :meth:`destinations` returned.
            value: The value that :meth:`serialize` passed to :func:`datastates.dumps`. Its arrays are the live arrays
                that were restored. An :class:`ArrayRef` stands for an array that was not restored.
        """
        raise NotImplementedError(f"{type(self).__name__} has object shards but no restore()")

    def arrays_by_name(self, saved: Saved) -> Sequence[Shard]:
        """Describe the arrays to restore if each is found by its name alone; by default the arrays of :meth:`shards`.

        Arrays are found by name in a checkpoint of another format, and under ``restore(rename=...)``. The provider must
        set :attr:`takes_parts`. Its objects are then neither asked for nor restored.

        Args:
            saved: The arrays that the checkpoint holds for the provider; it has no objects. Live values that are no
                shard, and so cannot be restored, must be reported to it.

        Returns:
            The shards. The engine compares them with the checkpoint, which may lack some of them.
        """
        del saved
        return [shard for shard in self.shards() if not shard.is_object]

    def take_arrays(self, shards: Sequence[Shard], saved: Saved) -> None:
        """Take the arrays that were restored by name. By default it does nothing: live arrays are written in place.

        Args:
            shards: The restored shards, of the shards that :meth:`arrays_by_name` returned.
            saved: The same object as for :meth:`arrays_by_name`.
        """
        del shards, saved


def walk_unique(providers: Sequence[StateProvider]) -> Iterator[StateProvider]:
    """Iterate over providers, and check each one.

    Raises:
        TypeError: ``providers`` is no list or other iterable, or an item is no StateProvider with a name.
        ValueError: Two providers have the same name.
    """
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


def stored_name(provider: StateProvider, rank: int, ranks: int) -> str:
    """The name under which a provider's state is stored.

    If several ranks save, a provider that is ``per_rank`` gets the rank's number at the end: ``name@00003``.
    """
    return f"{provider.name}@{rank:05d}" if provider.per_rank and ranks > 1 else provider.name


def refuse_path(providers: Sequence[StateProvider]) -> None:
    """Raise TypeError for a path in the place of providers."""
    if isinstance(providers, (str, bytes, os.PathLike)):
        raise TypeError(f"providers: got the path {providers!r:.80}; providers come first, then the path")
