"""Tells whether an optimizer's ``load_state_dict`` runs code of its own, and undoes its conversions of types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datastates._base.loaded import loaded
from datastates.providers.optimizer.state_dict_tree import with_parameters
from datastates.state.nested import with_items
from datastates.state.subclasses import is_tensor


def loads_by_itself(optimizer: Any) -> bool:
    """Whether hooks or methods of the optimizer's own take a state. The state may then have any form."""
    base, kind = loaded("torch").optim.Optimizer, type(optimizer)
    own = "load_state_dict" in vars(optimizer) or kind.load_state_dict is not base.load_state_dict
    return own or bool(optimizer._optimizer_load_state_dict_pre_hooks) or not _is_of_torch(kind.__setstate__)


def is_of_torch(optimizer: Any) -> bool:
    """Whether the optimizer is of ``torch.optim``. Its states have the element type of their parameter."""
    return _is_of_torch(type(optimizer))


def _is_of_torch(found: Any) -> bool:
    return str(found.__module__).startswith("torch.optim.")


def uncast(optimizer: Any, given: Any, keeps: Callable[[Any], bool]) -> dict[str, str]:
    """Undo the conversions of torch's ``load_state_dict``, which gives states the element type of their parameter.

    Args:
        optimizer: The optimizer, which has loaded a state dict.
        given: The state dict.
        keeps: Tells whether a tensor in the state dict must keep its type.

    Returns:
        For each name of a state that was converted and stays so, the type before and the type now.
    """
    changed: dict[str, str] = {}

    def back(name: str, now: Any, before: Any) -> Any:
        if is_tensor(now) and is_tensor(before):
            if now.dtype == before.dtype:
                return now
            if keeps(before):
                return before.to(now.device)
            changed[name] = f"{before.dtype} to {now.dtype}".replace("torch.", "")
        elif isinstance(now, dict) and isinstance(before, dict):
            for key in now.keys() & before.keys():
                now[key] = back(name, now[key], before[key])
        elif isinstance(now, list) and isinstance(before, list):
            now[:] = [back(name, a, b) for a, b in zip(now, before, strict=True)]
        elif isinstance(now, tuple) and isinstance(before, tuple):
            return with_items(now, [back(name, a, b) for a, b in zip(now, before, strict=True)])
        return now

    for _, parameter, states in with_parameters(given, optimizer):
        live = optimizer.state.get(parameter, {})
        for name in states.keys() & live.keys() - {"step"}:  # a step on the device must be float32 for the kernel
            live[name] = back(str(name), live[name], states[name])
    return changed
