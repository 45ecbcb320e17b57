"""A rank's own plan, made anew only where the state dict has changed in something that plans are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.tensor import DTensor


class LocalPlans:
    """One save's after the other, of one rank. Used by one thread at a time.

    Torch makes a plan in some tens of microseconds a tensor, for which training goes without the interpreter. What its
    default planner makes is compared by what it is made of; any other planner is asked each time.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._basis: list[object] | None = None
        self._plan = SavePlan([])

    def plan(self, planner: SavePlanner) -> SavePlan:
        """What ``planner.create_local_plan()`` gives: where nothing has changed, the very plan of the last time.

        ``planner.set_up_planner()`` was called.
        """
        basis = _basis(planner)
        if basis is None or basis != self._basis:
            self._basis = None
            self._plan = planner.create_local_plan()
            self._basis = basis
        return self._plan


def _basis(planner: SavePlanner) -> list[object] | None:
    """All that torch's default planner looks at, but for what cannot change within a run; None where it may be more."""
    if type(planner) is not DefaultSavePlanner or getattr(planner, "_enable_plan_caching", False):
        return None
    basis: list[object] = [planner.mappings if planner.flatten_state_dict else None]
    for name, value in planner.state_dict.items():
        kind: Any = type(value)
        if kind is DTensor:
            local = value._local_tensor
            basis.append((name, value._spec, value.requires_grad, local.dtype, local.layout, local.is_pinned()))
        elif kind is torch.Tensor or kind is torch.nn.Parameter:
            properties = (value.dtype, value.layout, value.requires_grad, value.is_pinned())
            basis.append((name, value.shape, *properties))
        elif isinstance(value, torch.Tensor | ShardedTensor) or hasattr(value, "__create_write_items__"):
            return None
        else:
            basis.append(name)
    return basis
