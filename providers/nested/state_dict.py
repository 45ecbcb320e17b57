"""A provider of nested containers, which are restored in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from datastates.container.pickle_torch import is_generator
from datastates.providers.nested.composed import check_boxes
from datastates.providers.nested.pairing import own_key, pair, same
from datastates.providers.nested.tree import Match, TreeProvider
from datastates.providers.optimizer.named_groups import LiveNames
from datastates.state import arrays, laziness, sharded_tensors
from datastates.state.nested import leaves, with_items
from datastates.state.provider import Saved
from datastates.state.shards import ArrayRef
from datastates.state.subclasses import beside, take_attributes


@runtime_checkable
class Stateful(Protocol):
    """An object that ``from_stateful`` takes: a module, an optimizer, a scheduler or a stateful data loader."""

    def state_dict(self) -> Any:
        """The state, as nested containers."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take the state back."""


def from_state_dict(
    name: str,
    mapping_or_callable: object | Callable[[], object],
    *,
    lazy: bool | Callable[[str], bool] | None = None,
) -> TreeProvider:
    """Make a provider for nested dicts, lists and tuples: each array becomes a shard, the rest is serialized.

    Restoring writes arrays in place and other values back into the live containers.

    Args:
        name: Top-level key in the checkpoint.
        mapping_or_callable: The live containers, or a callable that returns them at each snapshot and restore. If
            the callable builds new containers at each call, only arrays can be restored: all other live values must
            equal the stored values.
        lazy: Whether arrays stay unchanged until the snapshot is captured: one answer for all, or a function of the
            key. By default parameters are lazy, and tensors whose memory torch alone can write: the gate guards them.
            NumPy and CuPy arrays are not lazy. Tensors that share memory with them, with a file or with another process
            are not, either.

    Returns:
        The provider. Its keys are the paths in the containers.

    Raises:
        TypeError: ``mapping_or_callable`` has ``state_dict`` and ``load_state_dict``: use ``from_stateful``.
    """
    if not isinstance(mapping_or_callable, dict | list | tuple) and isinstance(mapping_or_callable, Stateful):
        kind = type(mapping_or_callable).__name__
        raise TypeError(
            f"{name!r}: {kind} has a state_dict(): give it to from_stateful, or call it and give its result"
        )
    return _ContainerProvider(name, mapping_or_callable, lazy)


class _ContainerProvider(TreeProvider):
    takes_parts = True

    def __init__(self, name: str, source: object, lazy: bool | Callable[[str], bool] | None) -> None:
        super().__init__(name)
        self._source = source
        self._lazy = lazy

    def value(self) -> object:
        return self._source() if callable(self._source) else self._source

    def is_lazy(self, key: str, array: object) -> bool:
        if self._lazy is None:
            return laziness.is_lazy_by_default(array)
        return self._lazy(key) if callable(self._lazy) else self._lazy

    def _lazy_again(self, keys: Sequence[str], values: Sequence[object], storages: Sequence[Any]) -> list[bool]:
        if self._lazy is not None:
            return super()._lazy_again(keys, values, storages)
        return laziness.are_lazy_by_default(values, storages)  # one may have been given to NumPy since

    def match(self, stored: object, saved: Saved) -> Match:
        live = self.value()
        names = LiveNames(stored, live, saved)
        check_boxes(self.name, self.listed(saved), lambda: dict(leaves(live)))
        found = pair(names.cut(stored), live, saved.arrays())
        mismatched = found.mismatched | names.mismatched
        if callable(self._source) and self.value() is not live:
            # each call of `source` builds new containers: a value that is put into them would be lost
            for key, stored_leaf, leaf in found.leaves:
                if not same(stored_leaf, leaf):
                    mismatched[key] = (
                        f"a value ({type(stored_leaf).__name__}) cannot be put back into what a callable builds; "
                        "use from_stateful, PickledObjectProvider or the live containers"
                    )
        unexpected = [*found.unexpected, *names.left_out]
        saved.report(missing=found.missing, unexpected=unexpected, mismatched=mismatched)
        pairs = [(ref.key, array) for ref, array in found.pairs]

        def accept(value: Any) -> None:
            merge(self.value(), names.cut(value))

        return Match([*pairs, *self.inside(saved)], accept, found.sharded)


def merge(live: Any, value: Any) -> object:
    """Put a restored value into live containers of the same structure, in place.

    Returns:
        The live container, or the restored value of a leaf or tuple, which the caller must put into the parent.
    """
    if sharded_tensors.is_sharded(live):
        return live
    if live is value or arrays.kind_of(live) is not None:
        take_attributes(live, value)
        return live
    if isinstance(live, dict) and isinstance(value, dict):
        for k, item in value.items():
            if (own := own_key(live, k)) is not None and live[own[0]] is not item:
                live[own[0]] = merge(live[own[0]], item)
        return live
    if isinstance(live, list) and isinstance(value, (list, tuple)):
        for i in range(min(len(live), len(value))):
            if live[i] is not value[i]:
                live[i] = merge(live[i], value[i])
        return live
    if isinstance(live, tuple) and isinstance(value, (list, tuple)) and len(live) == len(value):
        return with_items(live, [merge(a, b) for a, b in zip(live, value, strict=True)])
    if is_generator(live) and is_generator(value):
        live.set_state(value.get_state())
        return live
    return live if isinstance(value, ArrayRef) else beside(live, value)
