"""A provider for an object with ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from datastates._base.loaded import loaded
from datastates.container.unbuilt import Unbuilt
from datastates.providers.modules.provider import ModuleProvider
from datastates.providers.modules.wrappers import Unwrapped
from datastates.providers.nested.composed import check_boxes, placed_like
from datastates.providers.nested.pairing import Differences, add, own_key, pair
from datastates.providers.nested.state_dict import Stateful
from datastates.providers.nested.tree import Match, TreeProvider, container_of
from datastates.providers.optimizer.named_groups import LiveNames, is_by_name
from datastates.providers.optimizer.provider import OptimizerProvider
from datastates.providers.wrap.replicated import ReplicatedProvider
from datastates.state import arrays, devices, dtensors, nested, together
from datastates.state.dtypes import FRACTIONS
from datastates.state.keys import component
from datastates.state.nested import leaves
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import ArrayRef


def stored_elsewhere(found: Differences, saved: Saved) -> Iterator[tuple[tuple[object, ...], object]]:
    """Yield the values to add to this rank's stored value, each with its path. Their arrays are live arrays.

    Only objects of ranks that stored arrays of the live state are read. So nothing of other ranks is read unless the
    state is now divided in another way than when it was saved.
    """
    held = [key for _, _, keys in found.added for key in keys]
    is_wanted = held and any(not _is_array(leaf) for _, live, _ in found.added for _, leaf in nested.leaves(live))
    others = list(saved.structures_beside("", held)) if is_wanted else []
    for path, live, keys in found.added:
        stored = next((at for at in (_at(other, path) for other in others) if at is not None), None)
        if stored is not None and not isinstance(stored[0], (ArrayRef, Unbuilt)):
            yield path, _with_stored(live, stored[0])
        elif keys:
            yield path, live


def _is_array(value: object) -> bool:
    return arrays.kind_of(value) is not None


def _at(value: Any, path: Sequence[object]) -> tuple[Any] | None:
    """The value at a path, in a tuple of one item; None if there is none."""
    for k in path:
        if isinstance(value, dict) and (own := own_key(value, k)) is not None:
            value = value[own[0]]
        elif isinstance(value, list) and isinstance(k, int) and k < len(value):
            value = value[k]
        else:
            return None
    return (value,)


def _with_stored(live: Any, stored: Any) -> Any:
    """Copy a live value, and replace the leaves in it by stored ones, except arrays."""
    if _is_array(live) or isinstance(stored, (ArrayRef, Unbuilt)):
        return live
    if isinstance(live, dict) and isinstance(stored, dict):
        made = copy.copy(live)
        for k, item in live.items():
            if (own := own_key(stored, k)) is not None:
                made[k] = _with_stored(item, stored[own[0]])
        return made
    if isinstance(live, (list, tuple)) and isinstance(stored, (list, tuple)) and len(live) == len(stored):
        items = [_with_stored(one, other) for one, other in zip(live, stored, strict=True)]
        return items if isinstance(live, list) else nested.with_items(live, items)
    return stored


def from_stateful(name: str, obj: Stateful, *, lazy: bool | Callable[[str], bool] = True) -> StateProvider:
    """Make a provider for an object with ``state_dict`` and ``load_state_dict``, called at each snapshot and restore.

    Parameters of modules and the states of torch optimizers are captured lazily, because only an optimizer step changes
    them. ``snapshot()`` copies all other arrays, such as buffers or a learning rate in a tensor.

    After a restore the object is as after ``load_state_dict`` with the stored state. Tensors of a module that the call
    would only copy are read in place. State for hooks or methods of the module's own is read into new memory and given
    to them. An optimizer that has no state yet gets its state in new memory; a DTensor's state is placed like its
    parameter.

    State that other ranks saved, such as other pipeline stages, is found by its keys. Of an optimizer state that is
    keyed by parameter names (``get_optimizer_state_dict``), only the states of live parameters are taken. A checkpoint
    of a :class:`~datastates.providers.optimizer.zero.ShardedZeroProvider` restores as well.

    Each rank saves its part of a DTensor. Other arrays beside DTensors must be the same on all ranks of the DTensors'
    meshes: the ranks compare their digests, and the snapshot fails where they differ. A ``DistributedDataParallel`` or
    a module of ``torch.compile``, nested or not, is saved as the module in it, without ``module.`` and ``_orig_mod.``
    in front of the keys. So the checkpoint also restores into the bare module. A wrapper with hooks on its state,
    methods for it or tensors of its own is saved as torch saves it. The arrays of a ``DistributedDataParallel`` must be
    the same on all ranks of its process group, except what it ignores.
    Buffers that it broadcasts before each forward pass are saved from the group's lowest rank, whatever others hold.

    Args:
        name: Top-level key in the checkpoint.
        obj: The live object.
        lazy: True: parameters and optimizer states stay unchanged until the snapshot is captured. Torch optimizers
            wait for that; call ``Checkpointer.gate()`` before any other update. ``snapshot()`` still copies parameters
            that may change elsewhere, as far as this is known. Where optimizers are saved beside the module, these are
            its trainable parameters that none of them holds, and all parameters of a module of which they hold none.
            They are also parameters of ``AveragedModel``, of an embedding with ``max_norm``, of fbgemm's tables, in
            memory that other processes share, and with hooks on their gradients. The states of an optimizer of such
            hooked parameters are copied, too. False: it copies everything. A function decides for each key, and nothing
            else does.

    Returns:
        The provider.

    Raises:
        TypeError: The object lacks one of the two methods.
    """
    if not isinstance(obj, Stateful):
        raise TypeError(f"{name!r}: {type(obj).__name__} has no state_dict() and load_state_dict()")
    if isinstance(obj, type):
        raise TypeError(f"{name!r}: {obj.__name__} is a class; give an object of it")
    if _is_a(obj, "nn.Module"):
        wrapped = Unwrapped.of(obj)
        module = ModuleProvider(name, wrapped, lazy)
        return module if wrapped.parallel is None else _DataParallel(module, wrapped)
    # a wrapper around an optimizer may be of its class without its attributes
    if _is_a(obj, "optim.Optimizer") and hasattr(obj, "param_groups"):
        return OptimizerProvider(name, obj, lazy)
    return _ObjectProvider(name, obj)


class _DataParallel(ReplicatedProvider):
    """The module in a ``DistributedDataParallel``, whose arrays are the same on all ranks of the process group."""

    def __init__(self, module: ModuleProvider, wrapped: Unwrapped) -> None:
        ranks = loaded("torch").distributed.get_process_group_ranks(wrapped.parallel.process_group)
        super().__init__(module, ranks)
        self._ignored = set(map(component, wrapped.ignored))
        # it sends the lowest rank's buffers to all ranks before each forward pass, so they differ in between
        sent = wrapped.module.named_buffers() if wrapped.parallel.broadcast_buffers else ()
        self._sent = {component(name) for name, _ in sent}

    def _said(self) -> object:
        return super()._said(), self._ignored, self._sent

    def _is_replicated(self, key: str) -> bool:
        return key not in self._ignored

    def _is_compared(self, key: str) -> bool:
        return key not in self._sent


class _ObjectProvider(TreeProvider):
    """An object that is neither a module nor an optimizer of torch."""

    def __init__(self, name: str, obj: Stateful) -> None:
        super().__init__(name)
        self._object = obj

    def value(self) -> object:
        return container_of(self.name, self._object.state_dict())

    def is_lazy(self, key: str, array: object) -> bool:
        del key, array
        return False

    def match(self, stored: object, saved: Saved) -> Match:
        """Restore into new memory, and give all to the object's ``load_state_dict()``.

        The live state is compared only where it has a say: ``state_dict()`` of a new object may have effects. A loader
        starts workers in it, and draws random numbers.
        """
        if (refused := _why_refused(self._object, stored)) is not None:
            saved.report(mismatched={"": refused})
            return Match([], lambda _: None)
        if self._compares(stored, saved):
            return self._match_live(stored, self.value(), saved)
        return Match([*together.fresh(saved, self.listed(saved)).items()], self._object.load_state_dict)

    def _compares(self, stored: object, saved: Saved) -> bool:
        """Whether the live state may decide which arrays are restored, and where: on which device, or as a DTensor.

        Loaders and samplers, which are iterated over, hold numbers and random states in host memory.
        """
        if is_by_name(stored):
            return True
        dtypes = {ref.dtype for ref in saved.arrays().values()}
        if not dtypes or (isinstance(self._object, Iterable) and dtypes.isdisjoint(FRACTIONS)):
            return False
        return saved.ranks > 1 or dtensors.may_exist() or devices.current_device() is not None

    def _match_live(self, stored: object, live: object, saved: Saved) -> Match:
        names = LiveNames(stored, live, saved)
        saved.report(unexpected=names.left_out, mismatched=names.mismatched)
        check_boxes(self.name, self.listed(saved), lambda: dict(leaves(live)))
        found = pair(names.cut(stored), live, saved.arrays())
        unwanted = tuple(f"{key}/" for key in names.left_out)
        kept = dict.fromkeys(key for key in self.listed(saved) if not key.startswith(unwanted))
        # DTensors are read in place if they fit, as DCP does, and so are arrays that only other ranks saved
        into = {
            ref.key: array
            for ref, array in found.pairs
            if ref.key not in kept or (dtensors.is_dtensor(array) and arrays.fits(ref, array))
        }
        like = {ref.key: array for ref, array in found.pairs}
        placed = into.keys() | found.sharded.keys()
        left = [key for key in kept if key not in placed]
        new = together.fresh(saved, left, like, of_optimizer=is_by_name(stored))
        added = list(stored_elsewhere(found, saved))

        def accept(value: Any) -> None:
            value = names.cut(value)
            for path, item in added:
                add(value, path, item)
            self._object.load_state_dict(placed_like(value, live))

        return Match([*into.items(), *new.items()], accept, found.sharded)


def _why_refused(obj: Any, stored: object) -> str | None:
    """Say why an object of torch is known to refuse a state, before anything is changed; None for other objects."""
    if _is_a(obj, "amp.GradScaler") and obj.is_enabled() and stored == {}:
        return "a disabled GradScaler was saved, and it is enabled here: leave it out, or make it with enabled=False"
    return None


def _is_a(obj: object, name: str) -> bool:
    """Whether an object is an instance of the torch class ``name``; False if torch is not imported."""
    found = loaded("torch")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None and isinstance(obj, found)
