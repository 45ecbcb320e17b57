"""Providers for nested containers and for objects with ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from datastates._base.loaded import loaded
from datastates.container.pickle_policy import is_generator
from datastates.errors import ProviderError
from datastates.providers.nested.pairing import add, pair
from datastates.providers.nested.taken_apart import is_inner
from datastates.providers.nested.tree import TreeProvider
from datastates.providers.optimizer.state_dict_tree import (
    fresh,
    group_differences,
    live_where_not_restored,
    of_live_names,
    other_shapes,
    sharded_parameters,
    states_left_out,
    with_all_states,
)
from datastates.providers.optimizer.stored_states import state_key
from datastates.providers.wrap.replicated import ReplicatedProvider
from datastates.state import arrays, dtensors, laziness, memory
from datastates.state.dressed import beside, is_tensor, take_attributes
from datastates.state.keys import component
from datastates.state.nested import with_items
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import ArrayRef


@runtime_checkable
class Stateful(Protocol):
    """An object that :func:`from_stateful` takes: a module, optimizer, scheduler, stateful data loader."""

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
            the callable builds new containers at each call, only arrays can be restored: all other values must equal
            the stored ones.
        lazy: Whether arrays stay unchanged until the snapshot is captured: one answer for all, or a function of the
            key. By default parameters are lazy, and tensors whose memory torch alone can write, as the gate guards
            them. NumPy and CuPy arrays are not, nor tensors that share memory with them, a file or another process.

    Returns:
        The provider. Its keys are the paths in the containers.

    Raises:
        TypeError: ``mapping_or_callable`` has ``state_dict`` and ``load_state_dict``: use :func:`from_stateful`.
    """
    if not isinstance(mapping_or_callable, dict | list | tuple) and isinstance(mapping_or_callable, Stateful):
        kind = type(mapping_or_callable).__name__
        raise TypeError(
            f"{name!r}: {kind} has a state_dict(): give it to from_stateful, or call it and give its result"
        )
    return _ContainerProvider(name, mapping_or_callable, lazy)


def from_stateful(name: str, obj: Stateful, *, lazy: bool = True) -> StateProvider:
    """Make a provider for an object with ``state_dict`` and ``load_state_dict``, called at each snapshot and restore.

    Parameters of modules and the states of torch optimizers are captured lazily, as only an optimizer step changes
    them. ``snapshot()`` copies all other arrays, such as buffers or a learning rate in a tensor.

    A restore writes into live tensors that match, and gives everything else to ``load_state_dict``. An optimizer that
    has no state yet gets its state that way; a DTensor's state is placed like its parameter.

    State that other ranks saved, such as those of other pipeline stages, is found by its keys. Of an optimizer state
    that is keyed by parameter names (``get_optimizer_state_dict``), only that of live parameters is taken. A
    checkpoint of a :class:`~datastates.providers.optimizer.zero.ShardedZeroProvider` restores as well.

    Each rank saves its part of a DTensor. Other arrays beside DTensors are taken to be the same on all ranks of the
    DTensors' meshes. A ``DistributedDataParallel`` is saved as the module in it, without ``module.`` in front of the
    keys, so the checkpoint also restores into the bare module. Its arrays are taken to be the same on all ranks of its
    process group, except parameters that it ignores.

    Args:
        name: Top-level key in the checkpoint.
        obj: The live object.
        lazy: True: parameters and optimizer states stay unchanged until the snapshot is captured. Torch optimizers
            wait for that; call ``Checkpointer.gate()`` before any other update. False: ``snapshot()`` copies them,
            too, for example weight averages (EMA) that are updated outside of an optimizer step.

    Returns:
        The provider.

    Raises:
        TypeError: The object lacks one of the two methods.
    """
    if not isinstance(obj, Stateful):
        raise TypeError(f"{name!r}: {type(obj).__name__} has no state_dict() and load_state_dict()")
    if _is_a(obj, "nn.parallel.DistributedDataParallel"):
        return _DataParallel(name, obj, lazy)
    return _StatefulProvider(name, obj, lazy)


class _DataParallel(ReplicatedProvider):
    """The module in a ``DistributedDataParallel``."""

    def __init__(self, name: str, wrapped: Any, lazy: bool) -> None:
        ranks = loaded("torch").distributed.get_process_group_ranks(wrapped.process_group)
        super().__init__(_StatefulProvider(name, wrapped.module, lazy), ranks)
        self._ignored = {component(key) for key in wrapped.parameters_to_ignore}

    def _said(self) -> object:
        return super()._said(), self._ignored

    def _is_replicated(self, key: str) -> bool:
        return key not in self._ignored


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

    def _lazy_again(self, keys: Sequence[str], values: Sequence[object]) -> list[bool]:
        if self._lazy is not None:
            return super()._lazy_again(keys, values)
        # a tensor may have been given to NumPy since the last snapshot
        return [self.is_lazy(key, array) for key, array in zip(keys, values, strict=True)]

    def match(self, stored: object, saved: Saved) -> Sequence[tuple[str, object]]:
        live = self.value()
        cut = of_live_names(stored, live)
        found = pair(cut, live, saved.arrays())
        mismatched = dict(found.mismatched)
        if callable(self._source) and self.value() is not live:
            # each call builds new containers: a value put into them would be lost
            for key, stored_leaf, leaf in found.leaves:
                if not same(stored_leaf, leaf):
                    mismatched[key] = (
                        f"a value ({type(stored_leaf).__name__}) cannot be put back into what a callable builds; "
                        "use from_stateful, PickledObjectProvider or the live containers"
                    )
        unexpected = [*found.unexpected, *states_left_out(stored, cut)]
        saved.report(missing=found.missing, unexpected=unexpected, mismatched=mismatched)
        return [*((ref.key, array) for ref, array in found.pairs), *_inner(saved)]

    def accept(self, value: Any) -> None:
        live = self.value()
        merge(live, of_live_names(value, live))


def _inner(saved: Saved) -> list[tuple[str, object]]:
    """Fresh arrays for those inside objects of other classes, as restore builds new objects."""
    stored = saved.arrays()  # makes each reference on access
    return [(key, memory.empty(stored[key])) for key in stored if is_inner(key)]


def same(a: object, b: object) -> bool:
    """Whether two leaves are equal; False if they cannot be compared."""
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # the object's own comparison may raise anything
        return False


def merge(live: Any, value: Any) -> object:
    """Put a restored value into live containers of the same structure; returns the item that the parent must hold."""
    if live is value or arrays.kind_of(live) is not None:
        take_attributes(live, value)
        return live
    if isinstance(live, dict) and isinstance(value, dict):
        for k, item in value.items():
            if k in live and live[k] is not item:
                live[k] = merge(live[k], item)
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


class _StatefulProvider(TreeProvider):
    def __init__(self, name: str, obj: Stateful, lazy: bool) -> None:
        super().__init__(name)
        self._object = obj
        self._lazy = lazy
        self._in_place = False
        self._live: object = None
        self._added: list[tuple[tuple[object, ...], object]] = []
        self._parameters: frozenset[int] | None = None
        self._is_module, self._is_optimizer = _is_a(obj, "nn.Module"), _is_a(obj, "optim.Optimizer")
        self.takes_parts = self._is_module  # the others' load_state_dict wants a whole state

    def value(self) -> object:
        state = self._object.state_dict()
        if not isinstance(state, (dict, list, tuple)):
            raise ProviderError(f"{self.name!r}: state_dict() gave a {type(state).__name__}, not a container")
        return state

    def _current(self) -> tuple[object, bool]:
        state = _variables(self._object)
        self._parameters = None
        if state is not None:
            return state, True
        if self._is_module:
            self._parameters = frozenset(
                arrays.address(p)
                for p in self._object.parameters()  # type: ignore[attr-defined]
                if arrays.kind_of(p) is not None
            )
        return self.value(), False

    def _lazy_again(self, keys: Sequence[str], values: Sequence[object]) -> list[bool]:
        if self._parameters is None:
            return super()._lazy_again(keys, values)
        return [self.is_lazy(key, array) for key, array in zip(keys, values, strict=True)]

    def is_lazy(self, key: str, array: Any) -> bool:
        if not self._lazy:
            return False
        if self._parameters is not None:
            return arrays.kind_of(array) == "torch" and arrays.address(array) in self._parameters
        if self._is_module:
            return laziness.is_parameter(array)
        # a scheduler changes the values in param_groups
        return self._is_optimizer and key.startswith("state/") and is_tensor(array)

    def match(self, stored: object, saved: Saved) -> Sequence[tuple[str, object]]:
        live = self.value()
        if self._is_module:
            found = pair(stored, live, saved.arrays())
            saved.report(missing=found.missing, unexpected=found.unexpected, mismatched=found.mismatched)
            plain = not found.leaves and not _has_load_hooks(self._object)
            self._in_place = plain and _is_live(self.value(), live)
            return [*((ref.key, array) for ref, array in found.pairs), *_inner(saved)]
        self._in_place = False
        if self._is_optimizer:
            return self._match_optimizer(stored, live, saved)
        cut = of_live_names(stored, live)
        left_out = states_left_out(stored, cut)
        saved.report(unexpected=left_out)
        found = pair(cut, live, saved.arrays())
        self._live, self._added = live, found.added
        unwanted = tuple(f"{key}/" for key in left_out)
        kept = dict.fromkeys(key for key in self.listed(saved) if not key.startswith(unwanted))
        # a live array that does not fit is left to load_state_dict, unless only other ranks had the stored one
        into = {ref.key: array for ref, array in found.pairs if ref.key not in kept or arrays.fits(ref, array)}
        known = saved.arrays()  # makes each reference on access
        return [*into.items(), *((key, memory.empty(known[key])) for key in kept if key not in into)]

    def _match_optimizer(self, stored: Any, live: object, saved: Saved) -> Sequence[tuple[str, object]]:
        differences = group_differences(stored, live)
        saved.report(mismatched=differences)
        if differences:
            self._in_place = True  # nothing is restored: accept() must not call load_state_dict
            return []
        stored, added = with_all_states(stored, saved)
        into = {ref.key: array for ref, array in pair(stored, live, saved.arrays()).pairs}
        like = sharded_parameters(stored, self._object)
        known = saved.arrays()
        keys = dict.fromkeys([*self.listed(saved), *(state_key(number, name) for number, name in added)])
        for number, mismatched in other_shapes(stored, self._object).items():
            saved.report(mismatched=mismatched)
            for name in stored["state"][number]:  # a parameter restores all its states or none
                keys.pop(state_key(number, name), None)
        found = {key: into[key] if key in into else fresh(known[key], like.get(key)) for key in keys}
        found_added = ((number, name, found.get(state_key(number, name))) for number, name in added)
        self._added = [(("state", number, name), array) for number, name, array in found_added if array is not None]
        return list(found.items())

    def accept(self, value: Any) -> None:
        if self._in_place:
            return
        if self._is_module:
            value = merge(self.value(), value)  # tensors that were not restored keep the live ones
        else:
            value = of_live_names(value, self._live)
            for path, item in self._added:
                add(value, path, item)
            if self._is_optimizer:
                value = live_where_not_restored(value, self._object.state_dict())
        self._live, self._added = None, []
        self._object.load_state_dict(value)


def _is_a(obj: object, name: str) -> bool:
    """Whether an object is an instance of that class of torch; False if torch is not imported."""
    found = loaded("torch")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None and isinstance(obj, found)


def _variables(obj: Any) -> dict[str, Any] | None:
    """A module's state with its parameters as ``Parameter``s, to tell them from buffers; None where that is not safe.

    It is not safe where ``state_dict`` is overridden, or the state holds anything but tensors, parameters and DTensors.
    """
    if not _is_a(obj, "nn.Module") or "state_dict" in vars(obj):
        return None
    torch = loaded("torch")
    if type(obj).state_dict is not torch.nn.Module.state_dict:
        return None
    state: dict[str, Any] = obj.state_dict(keep_vars=True)
    plain = all(t in (torch.Tensor, torch.nn.Parameter) or dtensors.is_class(t) for t in set(map(type, state.values())))
    return state if plain else None


def _has_load_hooks(module: Any) -> bool:
    names = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    return any(getattr(m, name, None) for m in module.modules() for name in names)


def _is_live(first: object, second: object) -> bool:
    """Whether two results of ``state_dict()`` share memory: then writing into one changes the object itself."""
    return _pointers(first) == _pointers(second)


def _pointers(state: Any) -> list[int]:
    if isinstance(state, Mapping):
        return [p for v in state.values() for p in _pointers(v)]
    if isinstance(state, (list, tuple)):
        return [p for v in state for p in _pointers(v)]
    return [arrays.address(state)] if arrays.kind_of(state) == "torch" else [id(state)]
