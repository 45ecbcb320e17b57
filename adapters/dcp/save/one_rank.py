"""Warns of tensors that DCP writes from one rank only, though nothing says that all ranks hold the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from datastates._base import log
from datastates.state import dtensors

_SHOWN = 3


def warn_of_plain_tensors(state: Any) -> None:
    """Log a warning that names the plain floating-point tensors of a state with DTensors; 0-dimensional ones pass.

    Torch's planner keeps one rank's item of each key. Parameters that FSDP2 was told to ignore, their optimizer's
    states and statistics that nothing synchronizes are lost with the others.

    Args:
        state: The flat state dict of a planner. Anything else passes.
    """
    if not isinstance(state, dict) or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if not any(dtensors.is_dtensor(value) for value in state.values()):
        return
    plain = [
        key
        for key, value in state.items()
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.ndim and value.is_floating_point()
    ]
    if plain:
        more = f" and {len(plain) - _SHOWN} more" if len(plain) > _SHOWN else ""
        log.warning(
            "%s%s: plain tensors beside DTensors, which torch writes from one rank and does not compare. Where "
            "ranks hold different ones, save each rank's under a key of its own, or by datastates.Checkpointer, which "
            "compares them",
            ", ".join(map(repr, plain[:_SHOWN])),
            more,
        )
