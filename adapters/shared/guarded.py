"""Chooses the tensors of a framework's state that may be captured while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from datastates.files.torch_files import Lazy
from datastates.providers.modules.changes import changing
from datastates.state import storages


def unguarded_storages(module: torch.nn.Module, optimizers: Sequence[Any] = ()) -> frozenset[int]:
    """Find the storages of a module that may change outside of an optimizer's step, such as those of its buffers.

    Args:
        module: The module.
        optimizers: The optimizers that train it: a trainable parameter that none of them holds may change. So may all
            if an optimizer has ``train()`` and ``eval()``. Without optimizers, parameters are taken to be in one.

    Returns:
        The addresses of the storages.
    """
    groups = (group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))
    parameters = changing(module, {id(parameter) for group in groups for parameter in group["params"]})
    if parameters is None or any(map(_has_modes, optimizers)):
        parameters = frozenset(map(storages.address, module.parameters()))
    return (parameters | frozenset(map(storages.address, module.buffers()))) - {0}


def _has_modes(optimizer: Any) -> bool:
    """Whether an optimizer changes parameters in ``train()`` and ``eval()``, as schedule-free ones do."""
    own = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper has both methods
    return callable(getattr(own, "train", None)) and callable(getattr(own, "eval", None))


def guarded_of(modules: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> Lazy:
    """A :data:`Lazy` for the state of modules: it chooses all but :func:`unguarded_storages`."""
    unguarded = frozenset().union(*(unguarded_storages(module, optimizers) for module in modules))
    return lambda _, tensor: storages.address(tensor) not in unguarded


def is_optimizer_state(key: str, tensor: torch.Tensor) -> bool:
    """A :data:`Lazy` for the state dicts of optimizers: a scheduler may change the values in ``param_groups``."""
    del tensor
    return key.startswith("state/")
