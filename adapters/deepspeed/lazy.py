"""Which tensors of a DeepSpeed file are lazy."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from datastates.adapters.torch_files import Lazy

# keys of DeepSpeed's parameters and optimizer states; everything else in such a file is small or the client's
_STATE = ("module", "optimizer", "optimizer_state_dict", "frozen_param_fragments")


def lazy_in(state: dict[Any, Any], buffers: Collection[int]) -> Lazy:
    """Whether only an optimizer step changes a tensor, given its key in a file and the tensor.

    That is so for parameters and optimizer states. Buffers, tensors in the optimizer's parameter groups, and what the
    client added may change at any time. Files without DeepSpeed's usual keys (a pipeline's layers, experts) hold only
    parameters and buffers.

    Args:
        state: What the file is to hold.
        buffers: Addresses of the storages that the forward pass may change.
    """
    has_sections = any(section in state for section in _STATE)

    def is_lazy(key: str, tensor: torch.Tensor) -> bool:
        path = key.split("/")
        if (has_sections and path[0] not in _STATE) or "param_groups" in path:
            return False
        return tensor.untyped_storage().data_ptr() not in buffers

    return is_lazy
