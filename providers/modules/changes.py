"""Finds the parameters of a module that may change outside of an optimizer's step."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from datastates._base.loaded import loaded
from datastates.state import arrays, laziness, storages

_UPDATE_THEMSELVES = {"fbgemm_gpu": None, "torchrec": "ShardedModule"}
"""Packages whose modules update their parameters inside ``backward()``, in native code: a few rows, without a gradient,
without a ``step()``, and unseen by torch's version counter. By package, the name of the class; None for every class."""


def changing(module: Any, stepped: Collection[int]) -> frozenset[int] | None:
    """Find the parameters that may change outside of an optimizer's step.

    - An embedding with ``max_norm`` is rewritten by its forward pass.
    - A parameter with hooks on its gradient may be updated by these, and a module of fbgemm updates its own.
    - A trainable parameter that no saved optimizer steps is updated in some other way, if at all.
    - A module without a parameter in any optimizer is probably an average of another module (EMA), as torch's
      ``AveragedModel`` is.

    Args:
        module: The module.
        stepped: Ids of the parameters of the optimizers that are saved with the module. If it is empty, parameters are
            taken to be in an optimizer that is not saved.

    Returns:
        The addresses of these parameters' storages; None if all parameters may change.
    """
    if _is_average(module):
        return None
    parameters = list(module.parameters())
    if stepped and not any(id(parameter) in stepped for parameter in parameters):
        return None
    found = [p for p in parameters if laziness.changes_outside_of_steps(p)]
    if stepped:
        found += [p for p in parameters if p.requires_grad and id(p) not in stepped]
    return frozenset(storages.address(p) for p in (*found, *_known(module)) if arrays.kind_of(p) is not None)


def _known(module: Any) -> Iterator[Any]:
    """The parameters that a module in a module changes, or that an average has, as its class tells."""
    torch = loaded("torch")
    for one in module.modules():
        if _is_average(one):
            yield from one.parameters()
        if isinstance(one, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and one.max_norm is not None:
            yield one.weight
        if any(_updates_itself(kind) for kind in type(one).__mro__):
            yield from one.parameters()


def _is_average(module: Any) -> bool:
    averages = loaded("torch.optim.swa_utils")
    return averages is not None and isinstance(module, averages.AveragedModel)


def _updates_itself(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return package in _UPDATE_THEMSELVES and _UPDATE_THEMSELVES[package] in (None, kind.__name__)
