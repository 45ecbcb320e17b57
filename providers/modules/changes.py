"""Finds the parameters of a module that may change outside of an optimizer's step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from datastates._base.loaded import loaded
from datastates.state import arrays


def changing(module: Any, stepped: Collection[int]) -> frozenset[int] | None:
    """The addresses of the parameters that may change outside of an optimizer's step; None if all of them may.

    An embedding with ``max_norm`` is rewritten by its forward pass. A module without a parameter in any optimizer is
    probably an average of another module (EMA), as torch's ``AveragedModel`` is.

    Args:
        module: The module.
        stepped: Ids of the parameters of the optimizers that are saved with the module. If it is empty, parameters are
            taken to be in an optimizer that is not saved.
    """
    torch, averages = loaded("torch"), loaded("torch.optim.swa_utils")
    if averages is not None and isinstance(module, averages.AveragedModel):
        return None
    if stepped and not any(id(parameter) in stepped for parameter in module.parameters()):
        return None
    embeddings = (m for m in module.modules() if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag)))
    weights = (m.weight for m in embeddings if m.max_norm is not None)
    return frozenset(arrays.address(w) for w in weights if arrays.kind_of(w) is not None)
