"""Chooses the tensors of a framework's state that may be captured while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from datastates.providers.modules.changes import changing
from datastates.state import storages

Lazy = Callable[[str, torch.Tensor], bool]
"""Given a tensor and its key (``state_dict/layer.weight``), whether only an optimizer step changes it."""


def unguarded_storages(module: torch.nn.Module, stepped: Collection[int] = ()) -> frozenset[int]:
    """Addresses of storages that may change outside of optimizers' steps; ``stepped`` is as for :func:`changing`."""
    parameters = changing(module, stepped)
    if parameters is None:
        parameters = frozenset(map(storages.address, module.parameters()))
    return (parameters | frozenset(map(storages.address, module.buffers()))) - {0}


def guarded_of(modules: Sequence[torch.nn.Module]) -> Lazy:
    """A :data:`Lazy` for the state of modules: it chooses all tensors that only an optimizer's step changes."""
    unguarded = frozenset().union(*map(unguarded_storages, modules))
    return lambda _, tensor: tensor.untyped_storage().data_ptr() not in unguarded


def is_optimizer_state(key: str, tensor: torch.Tensor) -> bool:
    """A :data:`Lazy` for the state dicts of optimizers: a scheduler may change the values in ``param_groups``."""
    del tensor
    return key.startswith("state/")
