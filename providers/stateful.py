"""A provider for an object with ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datastates._base.loaded import loaded
from datastates.providers.modules.provider import ModuleProvider
from datastates.providers.modules.wrappers import Unwrapped
from datastates.providers.nested.other_ranks import stored_elsewhere
from datastates.providers.nested.pairing import add, pair
from datastates.providers.nested.state_dict import Stateful
from datastates.providers.nested.tree import Match, TreeProvider, container_of
from datastates.providers.optimizer.provider import OptimizerProvider
from datastates.providers.optimizer.state_dict_tree import of_live_names, states_left_out
from datastates.providers.wrap.replicated import ReplicatedProvider
from datastates.state import arrays, dtensors, memory
from datastates.state.keys import component
from datastates.state.provider import Saved, StateProvider


def from_stateful(name: str, obj: Stateful, *, lazy: bool | Callable[[str], bool] = True) -> StateProvider:
    """Make a provider for an object with ``state_dict`` and ``load_state_dict``, called at each snapshot and restore.

    Parameters of modules and the states of torch optimizers are captured lazily, as only an optimizer step changes
    them. ``snapshot()`` copies all other arrays, such as buffers or a learning rate in a tensor.

    A restore leaves what ``load_state_dict`` of the stored state leaves. Tensors of a module that it would only copy
    are read in place. What hooks or methods of a module's own take is read into new memory and given to them. An
    optimizer that has no state yet gets its state that way; a DTensor's state is placed like its parameter.

    State that other ranks saved, such as those of other pipeline stages, is found by its keys. Of an optimizer state
    that is keyed by parameter names (``get_optimizer_state_dict``), only that of live parameters is taken. A
    checkpoint of a :class:`~datastates.providers.optimizer.zero.ShardedZeroProvider` restores as well.

    Each rank saves its part of a DTensor. Other arrays beside DTensors are taken to be the same on all ranks of the
    DTensors' meshes. A ``DistributedDataParallel`` and what ``torch.compile`` gives, nested or not, are saved as the
    module in them, without ``module.`` and ``_orig_mod.`` in front of the keys, so the checkpoint also restores into
    the bare module. One that has hooks on its state, methods for it or tensors of its own is saved as torch saves it.
    The arrays of a ``DistributedDataParallel`` are taken to be the same on all ranks of its process group. Parameters
    that it ignores are not.

    Args:
        name: Top-level key in the checkpoint.
        obj: The live object.
        lazy: True: parameters and optimizer states stay unchanged until the snapshot is captured. Torch optimizers
            wait for that; call ``Checkpointer.gate()`` before any other update. ``snapshot()`` still copies parameters
            that are known to change elsewhere: those of ``AveragedModel``, of an embedding with ``max_norm``, and of a
            module of which the optimizers that are saved with it hold no parameter. False: it copies everything. A
            function answers for each key, whatever is known.

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
    if _is_a(obj, "optim.Optimizer"):
        return OptimizerProvider(name, obj, lazy)
    return _ObjectProvider(name, obj)


class _DataParallel(ReplicatedProvider):
    """The module in a ``DistributedDataParallel``."""

    def __init__(self, module: ModuleProvider, wrapped: Unwrapped) -> None:
        ranks = loaded("torch").distributed.get_process_group_ranks(wrapped.parallel.process_group)
        super().__init__(module, ranks)
        self._ignored = set(map(component, wrapped.ignored))

    def _said(self) -> object:
        return super()._said(), self._ignored

    def _is_replicated(self, key: str) -> bool:
        return key not in self._ignored


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
        live = self.value()
        if (refused := _why_refused(self._object, stored)) is not None:
            saved.report(mismatched={"": refused})
            return Match([], lambda _: None)
        cut = of_live_names(stored, live)
        left_out = states_left_out(stored, cut)
        saved.report(unexpected=left_out)
        found = pair(cut, live, saved.arrays())
        unwanted = tuple(f"{key}/" for key in left_out)
        kept = dict.fromkeys(key for key in self.listed(saved) if not key.startswith(unwanted))
        # DTensors are read in place where they fit, as DCP does; and what only other ranks had
        into = {
            ref.key: array
            for ref, array in found.pairs
            if ref.key not in kept or (dtensors.is_dtensor(array) and arrays.fits(ref, array))
        }
        known = saved.arrays()  # makes each reference on access
        like = {ref.key: array for ref, array in found.pairs}
        new = ((key, memory.fresh(known[key], like.get(key))) for key in kept if key not in into)

        added = list(stored_elsewhere(found, saved))

        def accept(value: Any) -> None:
            value = of_live_names(value, live)
            for path, item in added:
                add(value, path, item)
            self._object.load_state_dict(value)

        return Match([*into.items(), *new], accept)


def _why_refused(obj: Any, stored: object) -> str | None:
    """Why an object of torch is known to refuse a state, before anything is changed; None for all others."""
    if _is_a(obj, "amp.GradScaler") and obj.is_enabled() and stored == {}:
        return "a disabled GradScaler was saved, and it is enabled here: leave it out, or make it with enabled=False"
    return None


def _is_a(obj: object, name: str) -> bool:
    """Whether an object is an instance of that class of torch; False if torch is not imported."""
    found = loaded("torch")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None and isinstance(obj, found)
