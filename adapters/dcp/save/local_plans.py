"""A rank's local plan, which is made anew only if something that it depends on has changed in the state dict."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.tensor import DTensor

_DESCRIBES_ITSELF = "__create_write_items__"
"""Torch asks an object with this method, or a DTensor whose local tensor has it, for its items."""


class LocalPlans:
    """The local plans of one rank, for one save after another. Used by one thread at a time.

    Torch takes tens of microseconds a tensor to make a plan, and training cannot use the interpreter meanwhile. A plan
    of torch's default planner is made anew only if its inputs have changed; any other planner is asked each time. The
    comparison keeps no tensors alive, only the meshes of DTensors.
    """

    def __init__(self) -> None:
        """Begin without a known plan."""
        self._basis: list[object] | None = None
        self._plan = SavePlan([])

    def plan(self, planner: SavePlanner) -> SavePlan:
        """The result of ``planner.create_local_plan()``, or the same plan object as last time if nothing has changed.

        Call ``planner.set_up_planner()`` before.
        """
        basis = _basis(planner)
        if basis is None or basis != self._basis:
            self._basis = None
            self._plan = planner.create_local_plan()
            self._basis = basis
        return self._plan


def _basis(planner: SavePlanner) -> list[object] | None:
    """Everything that torch's default planner looks at and that can change in a run; None if it may look at more."""
    if type(planner) is not DefaultSavePlanner or planner._enable_plan_caching:
        return None
    basis: list[object] = [planner.mappings if planner.flatten_state_dict else None]
    for name, value in planner.state_dict.items():
        kind: Any = type(value)
        if kind is DTensor:
            local, spec = value._local_tensor, value._spec
            if not _is_plain(local):
                return None
            # not the spec itself: it can be changed in place
            placed = (spec.mesh, spec.placements, spec.shard_order, value.shape)
            basis.append((name, placed, value.requires_grad, local.dtype, local.layout, local.is_pinned()))
        elif _is_plain(value):
            properties = (value.dtype, value.layout, value.requires_grad, value.is_pinned())
            basis.append((name, value.shape, *properties))
        elif isinstance(value, torch.Tensor | ShardedTensor) or hasattr(value, _DESCRIBES_ITSELF):
            return None
        else:
            basis.append(name)
    return basis


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not hasattr(value, _DESCRIBES_ITSELF)
