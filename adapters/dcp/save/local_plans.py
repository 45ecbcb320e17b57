"""A rank's own plan, made anew only where the state dict has changed in something that plans are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.tensor import DTensor

_DESCRIBES_ITSELF = "__create_write_items__"
"""Torch asks an object that has this, or a DTensor whose local tensor has it, which items it is."""


class LocalPlans:
    """One save's after the other, of one rank. Used by one thread at a time.

    Torch makes a plan in some tens of microseconds a tensor, for which training goes without the interpreter. What its
    default planner makes is compared by what it is made of; any other planner is asked each time. No tensor is kept
    alive by that, but the meshes of DTensors.
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
            local, spec = value._local_tensor, value._spec
            if not _is_plain(local):
                return None
            # not the spec itself: it can be changed in place
            placed = (spec.mesh, spec.placements, getattr(spec, "shard_order", None), value.shape)
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
