"""A provider of a nested value: a shard for each array, and one object for the rest, which refers to the arrays."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from datastates.errors import ProviderError
from datastates.providers.nested.skeleton import Skeleton
from datastates.providers.nested.taken_apart import PlainTree, Tree, is_plain, take_apart, tied
from datastates.state import arrays, laziness, sharded_tensors, subclasses, together
from datastates.state.depth import deeper
from datastates.state.destinations import Destinations
from datastates.state.keys import is_inner, parts
from datastates.state.known_layout import Describer
from datastates.state.nested import leaves
from datastates.state.provider import Encoder, Saved, StateProvider
from datastates.state.shards import ArrayRef, Shard, Shards, object_shard


@dataclass(eq=False)
class ByKey:
    """Nested dicts that are stored as arrays and one object. The keys of these are their paths in the dicts.

    Attributes:
        value: The nested dicts, with an ArrayRef for each array, and with the structure of the object.
        key: The object's key.
        targets: The live arrays that are restored, by key.
    """

    value: dict[Any, Any]
    key: str
    targets: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, saved: Saved) -> ByKey | None:
        """Rebuild the dicts that all ranks saved together; None without exactly one object, or if a key is no path."""
        objects, known = saved.objects(), saved.arrays()
        if len(objects) != 1:
            return None
        value: dict[Any, Any] = {}
        try:
            for key in saved.every_key():
                _put(value, key, known[key])
            _put(value, objects[0], saved.structure(objects[0]))
        except ValueError:
            return None
        return cls(value, objects[0])

    def assemble(self, restored: object) -> dict[Any, Any]:
        """The nested dicts with the restored arrays and the restored object in them."""
        result: dict[Any, Any] = _over(self.value, self.targets)
        _put(result, self.key, restored)
        return result


def _over(item: Any, targets: Mapping[str, object]) -> Any:
    if isinstance(item, dict):
        return {k: _over(v, targets) for k, v in item.items()}
    return targets.get(item.key, item) if isinstance(item, ArrayRef) else item


def _put(value: dict[Any, Any], key: str, leaf: object) -> None:
    """Put a leaf at the path that a key spells; raises ValueError if the key is no path, or lies below another leaf."""
    *path, last = parts(key)
    for part in path:
        value = value.setdefault(part, {})
        if not isinstance(value, dict):
            raise ValueError(f"{key!r} is below a leaf")
    value[last] = leaf


def _plain_attributes(values: Sequence[object]) -> list[dict[str, Any]] | None:
    """A copy of each array's Python attributes; None if no array has any, an empty list if some are not plain."""
    live = subclasses.attributes_of(values)
    if live is None:
        return None
    return [dict(own) for own in live] if all(is_plain(v) for own in live for v in own.values()) else []


def _with(shards: Sequence[Shard], rest: object) -> Sequence[Shard]:
    """Append the object shard of the rest to array shards."""
    objects = [object_shard(source=rest)]
    return shards.but(objects=objects) if isinstance(shards, Shards) else [*shards, *objects]


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """The form of a nested value at the last snapshot.

    Attributes:
        skeleton: The containers of the value.
        detached: Whether parameters in the value were stored as plain tensors.
        parameter: For each array, whether it was stored as a parameter.
    """

    skeleton: Skeleton
    detached: bool
    parameter: list[bool]


def _plain_tree(
    form: _Form,
    values: Sequence[object],
    requires_grad: Sequence[bool],
    plain: Sequence[object],
    attributes: Sequence[dict[str, Any]] | None,
) -> PlainTree:
    apart = list(map(operator.or_, requires_grad, form.parameter))
    return PlainTree(form.skeleton, requires_grad, form.parameter, plain, attributes, tied(values, apart))


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """How a live value takes a stored value.

    Attributes:
        pairs: The arrays to restore into, each with its key.
        accept: Takes the stored value with its restored arrays, and restores all values that are not in place yet.
        sharded: The live ShardedTensors to restore into, by key.
    """

    pairs: Sequence[tuple[str, object]]
    accept: Callable[[Any], object]
    sharded: Mapping[str, object] = field(default_factory=dict)


class TreeProvider(StateProvider):
    """A provider whose state is one nested value. Subclasses say where the value comes from and goes to."""

    def __init__(self, name: str) -> None:
        """Name the provider: ``name`` is the top-level key in the checkpoint."""
        super().__init__(name)
        self._describer = Describer()
        self._form: _Form | None = None
        self._lazy_flags: list[bool] | None = None

    @abstractmethod
    def value(self) -> object:
        """The live value, as nested dicts, lists and tuples."""

    @abstractmethod
    def is_lazy(self, key: str, array: object) -> bool:
        """Whether an array of the live state stays unchanged until the snapshot is captured."""

    def _current(self) -> tuple[object, bool]:
        """The value to save, and whether to store its parameters as plain tensors."""
        return self.value(), False

    @abstractmethod
    def match(self, stored: object, saved: Saved) -> Match:
        """Compare the live value with a stored one.

        Args:
            stored: The stored value, with an ArrayRef for each array.
            saved: The saved state, which differences are reported to.

        Returns:
            The arrays to restore into, and the function that takes the restored value.
        """

    def knowledge(self) -> object:
        """The containers, and the addresses and layouts of the arrays."""
        known = self._describer.known
        return None if self._form is None and known is None else (self._form, known)

    def learn(self, knowledge: object) -> None:
        """Take the findings of an earlier provider. Which arrays are lazy is decided anew."""
        assert isinstance(knowledge, tuple)
        self._form, self._describer.known = knowledge
        self._lazy_flags = None

    @deeper()
    def shards(self) -> Sequence[Shard]:
        """Split the live value: a shard for each array, then the object shard of the rest."""
        return self._described(*self._current())

    def _described(self, value: object, detached: bool) -> Sequence[Shard]:
        again = self._again(value, detached)
        if again is not None:
            return again
        self._form = None
        skeleton = Skeleton.of(value, is_plain)
        stripped = None if skeleton is None else skeleton.strip(value)
        attributes = None if stripped is None or detached else _plain_attributes(stripped[0])
        if skeleton is None or stripped is None or attributes == []:
            tree = take_apart(value, self.is_lazy, self._describer, detached=detached)
            tree.name = self.name
            return _with(tree.shards, tree)
        keys, (values, plain) = skeleton.keys, stripped
        self._lazy_flags = list(map(self.is_lazy, keys, values))
        parameter = [not detached and laziness.is_parameter(array) for array in values]
        shards = self._describer.describe(keys, values, self._lazy_flags)
        requires_grad = [not detached and bool(getattr(array, "requires_grad", False)) for array in values]
        self._form = _Form(skeleton, detached, parameter)
        return _with(shards, _plain_tree(self._form, values, requires_grad, plain, attributes))

    def _again(self, value: object, detached: bool) -> Sequence[Shard] | None:
        """Describe the value by the last snapshot's shards, if it has the same structure and memory; else None."""
        form = self._form
        stripped = None if form is None or form.detached != detached else form.skeleton.strip(value)
        return None if form is None or stripped is None else self._filled(form, *stripped)

    def _filled(self, form: _Form, values: Sequence[Any], plain: Sequence[object]) -> Sequence[Shard] | None:
        """Describe the values of a state of a known form; None if their memory has changed."""
        keys, detached = form.skeleton.keys, form.detached
        shards = self._describer.again(keys, values, partial(self._lazy_again, keys, values))
        if shards is None:
            return None
        attributes = None if detached else _plain_attributes(values)
        if attributes == []:
            return None
        requires_grad = [False] * len(keys) if detached else list(map(attrgetter("requires_grad"), values))
        return _with(shards, _plain_tree(form, values, requires_grad, plain, attributes))

    def _lazy_again(self, keys: Sequence[str], values: Sequence[object], storages: Sequence[Any]) -> list[bool]:
        """The answers of :meth:`is_lazy` for arrays with the same keys as at the last snapshot, kept between calls.

        The arrays are torch's tensors; ``storages`` are theirs.
        """
        del storages
        if self._lazy_flags is None:
            self._lazy_flags = list(map(self.is_lazy, keys, values))
        return self._lazy_flags

    def serialize(self, shard: Shard) -> Encoder:
        """Return the encoder, which runs in the background: :meth:`shards` has copied all values but the arrays."""
        assert isinstance(shard.source, (Tree, PlainTree))
        return shard.source.encode

    @deeper()
    def destinations(self, saved: Saved) -> Sequence[Shard]:
        """The arrays that :meth:`match` chooses, and the object that holds the rest."""
        by_key = None if "" in saved.objects() else ByKey.of(saved)
        if by_key is None and "" not in saved.objects():
            saved.report(mismatched={"": "was not saved as a nested value"})
            return []
        found = self.match(saved.structure("") if by_key is None else by_key.value, saved)
        keys, values = [key for key, _ in found.pairs], [array for _, array in found.pairs]
        if by_key is not None:
            by_key.targets = dict(found.pairs)
        rest = object_shard("" if by_key is None else by_key.key, source=(found.accept, by_key))
        boxes = [box for key, tensor in found.sharded.items() for box in sharded_tensors.destinations(key, tensor)]
        every = Destinations(keys, values, [rest])
        return [*every, *boxes] if boxes else every

    def arrays_by_name(self, saved: Saved) -> Sequence[Shard]:
        """The live arrays. A tensor that is no plain memory, such as a sparse tensor, is not restored by its name."""
        known, composed = saved.arrays(), saved.composed()
        for key, leaf in leaves(self.value()):
            if subclasses.is_tensor(leaf) and arrays.kind_of(leaf) is None:
                if key in known or key in composed:
                    saved.report(
                        mismatched={key: "the live tensor is no plain memory, and is not restored by its name"}
                    )
                else:
                    saved.report(missing=[key])
        return [shard for shard in super().arrays_by_name(saved) if not is_inner(shard.key)]

    @staticmethod
    def listed(saved: Saved) -> Collection[str]:
        """Keys of all arrays in the stored value, arrays that share memory with others among them."""
        return saved.arrays() if "" in saved.objects() else saved.every_key()

    @staticmethod
    def inside(saved: Saved) -> list[tuple[str, object]]:
        """New arrays by key for the arrays inside pickled objects, as a restore builds new objects."""
        return [*together.fresh(saved, filter(is_inner, saved.arrays())).items()]

    @deeper()
    def restore(self, shard: Shard, value: object) -> None:
        """Hand the whole value, with its restored arrays, to the ``accept`` of the match."""
        rest: Any = shard.source
        accept, by_key = rest
        accept(value if by_key is None else by_key.assemble(value))


def container_of(name: str, state: object) -> object:
    """Check the result of a ``state_dict()``; raises ProviderError for anything but a dict, list or tuple."""
    if not isinstance(state, (dict, list, tuple)):
        raise ProviderError(f"{name!r}: state_dict() gave a {type(state).__name__}, not a container")
    return state
