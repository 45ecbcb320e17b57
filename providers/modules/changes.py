"""Which parameters of a module something else than an optimizer's step may change."""

from __future__ import annotations

import weakref
from typing import Any

from datastates._base.loaded import loaded
from datastates.state import arrays

_optimizers: weakref.WeakKeyDictionary[object, Any] = weakref.WeakKeyDictionary()
"""The optimizers of the providers that there are."""


def know(provider: object, optimizer: Any) -> None:
    """Note an optimizer of torch, as long as its provider lives."""
    _optimizers[provider] = optimizer


def changing(module: Any) -> frozenset[int] | None:
    """Where the parameters begin that may change outside of an optimizer's step; None if all of them may.

    An embedding with ``max_norm`` is rewritten by its forward pass. A module of which no optimizer of a provider holds
    any parameter is probably an average of another one (EMA), as torch's ``AveragedModel`` is.
    """
    torch = loaded("torch")
    averages = loaded("torch.optim.swa_utils")
    if averages is not None and isinstance(module, averages.AveragedModel):
        return None
    stepped = {
        id(p) for optimizer in list(_optimizers.values()) for group in optimizer.param_groups for p in group["params"]
    }
    if stepped and not any(id(parameter) in stepped for parameter in module.parameters()):
        return None
    embeddings = (m for m in module.modules() if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag)))
    weights = (m.weight for m in embeddings if m.max_norm is not None)
    return frozenset(arrays.address(w) for w in weights if arrays.kind_of(w) is not None)
