"""A provider that joins several others under one name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from datastates.state.keys import component
from datastates.state.known_layout import Knowledge
from datastates.state.provider import Encoder, Saved, StateProvider, walk_unique
from datastates.state.shards import ArrayLeaf, ArrayRef, Shard, StoredArray


class CompositeProvider(StateProvider):
    """Several providers under one name: a key is the child's name, then the child's key."""

    def __init__(self, name: str, providers: Sequence[StateProvider]) -> None:
        """Keep the children.

        Args:
            name: Top-level key in the checkpoint.
            providers: The children, each with a name of its own.

        Raises:
            TypeError: A child is no :class:`~datastates.protocol.StateProvider`.
            ValueError: Two children share a name, or only some of them are ``per_rank``.
        """
        super().__init__(name)
        self._children = list(walk_unique(providers))
        apart = [child.name for child in self._children if child.per_rank]
        if apart and len(apart) < len(self._children):
            raise ValueError(
                f"{name!r}: {', '.join(map(repr, apart))} is state of each rank, the other providers hold the model's: "
                "these are stored differently, so give each kind a CompositeProvider of its own"
            )
        self.per_rank = bool(apart)
        self.takes_parts = all(child.takes_parts for child in self._children)

    def knowledge(self) -> object:
        """The knowledge of all children, by their names."""
        known = Knowledge()
        known.take(self._children)
        return known or None

    def learn(self, knowledge: object) -> None:
        """Hand each child the knowledge of the earlier child with its name and class."""
        assert isinstance(knowledge, Knowledge)
        knowledge.teach(self._children)

    def stepped(self) -> Iterable[object]:
        """The parameters that the children's optimizers change."""
        return chain.from_iterable(child.stepped() for child in self._children)

    def stand_beside(self, providers: Sequence[StateProvider]) -> None:
        """Tell all children which providers take part in a snapshot."""
        for child in self._children:
            child.stand_beside(providers)

    def shards(self) -> Sequence[Shard]:
        """The shards of all children; the child's name is put in front of each key."""
        return [_adopt(child, shard) for child in self._children for shard in child.shards()]

    def serialize(self, shard: Shard) -> bytes | Encoder:
        """Let the child serialize its object."""
        child, own = _origin(shard)
        result = child.serialize(own)
        if isinstance(result, bytes):
            return result

        def encode(locate: Callable[[ArrayLeaf], StoredArray]) -> bytes:
            return result(lambda leaf: locate(replace(leaf, key=_key(child, leaf.key))))

        return encode

    def destinations(self, saved: Saved) -> Sequence[Shard]:
        """The destinations of all children; each child sees only its part of the checkpoint."""
        names = {component(child.name) for child in self._children}
        strangers = [k for k in (*saved.arrays(), *saved.objects()) if k.split("/")[0] not in names]
        saved.report(unexpected=sorted(strangers))
        return [_adopt(child, shard) for child in self._children for shard in child.destinations(_Part(saved, child))]

    def restore(self, shard: Shard, value: object) -> None:
        """Hand the object to its child."""
        child, own = _origin(shard)
        child.restore(own, value)

    def arrays_by_name(self, saved: Saved) -> Sequence[Shard]:
        """The arrays of all children; the child's name is put in front of each key."""
        named = ((child, child.arrays_by_name(_Part(saved, child))) for child in self._children)
        return [_adopt(child, shard) for child, shards in named for shard in shards]

    def take_arrays(self, shards: Sequence[Shard], saved: Saved) -> None:
        """Hand to each child its own arrays."""
        for child in self._children:
            own = [replace(s, key=key) for s in shards for key in _own_keys(child, [s.key])]
            child.take_arrays(own, _Part(saved, child))


def _key(child: StateProvider, key: str) -> str:
    return f"{component(child.name)}/{key}" if key else component(child.name)


def _own_keys(child: StateProvider, keys: Iterable[str]) -> list[str]:
    name = component(child.name)
    return ["" if key == name else key[len(name) + 1 :] for key in keys if key == name or key.startswith(name + "/")]


def _adopt(child: StateProvider, shard: Shard) -> Shard:
    # an object shard carries its origin, for serialize() and restore(); an array shard needs none
    return replace(shard, key=_key(child, shard.key), source=(child, shard) if shard.is_object else shard.source)


def _origin(shard: Shard) -> tuple[StateProvider, Shard]:
    assert isinstance(shard.source, tuple)
    return shard.source


class _Part(Saved):
    """The arrays and objects that a checkpoint holds for one child."""

    def __init__(self, saved: Saved, child: StateProvider) -> None:
        self.strict, self.ranks = saved.strict, saved.ranks
        self._saved = saved
        self._child = child

    def arrays(self) -> Mapping[str, ArrayRef]:
        return _Arrays(self._saved.arrays(), self._child)

    def every_key(self) -> Sequence[str]:
        return _own_keys(self._child, self._saved.every_key())

    def sharing(self, keys: Sequence[str]) -> Sequence[Mapping[str, int]]:
        groups = self._saved.sharing([_key(self._child, key) for key in keys])
        own = [_own_keys(self._child, group) for group in groups]
        return [dict(zip(mine, group.values(), strict=True)) for mine, group in zip(own, groups, strict=True)]

    def objects(self) -> Sequence[str]:
        return _own_keys(self._child, self._saved.objects())

    def report(
        self,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, str] | None = None,
    ) -> None:
        self._saved.report(
            missing=[_key(self._child, k) for k in missing],
            unexpected=[_key(self._child, k) for k in unexpected],
            mismatched={_key(self._child, k): what for k, what in (mismatched or {}).items()},
        )

    def restored_keys(self) -> Collection[str]:
        return _own_keys(self._child, self._saved.restored_keys())

    def structure(self, key: str) -> object:
        return self._saved.structure(_key(self._child, key))

    def structures_beside(self, key: str, arrays: Sequence[str]) -> Iterator[object]:
        return self._saved.structures_beside(_key(self._child, key), [_key(self._child, k) for k in arrays])


class _Arrays(Mapping[str, ArrayRef]):
    """The stored arrays of one child by key. It lists the arrays of one rank, and finds arrays of any rank by key."""

    def __init__(self, arrays: Mapping[str, ArrayRef], child: StateProvider) -> None:
        self._arrays = arrays
        self._child = child

    def __len__(self) -> int:
        return len(_own_keys(self._child, self._arrays))

    def __iter__(self) -> Iterator[str]:
        return iter(_own_keys(self._child, self._arrays))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and _key(self._child, key) in self._arrays

    def __getitem__(self, key: str) -> ArrayRef:
        return replace(self._arrays[_key(self._child, key)], key=key)
