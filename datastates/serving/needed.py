"""The weights that a model needs, as transformers builds it from its configuration; none is allocated."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from datastates.errors import DatastatesError


@dataclass(frozen=True, slots=True)
class Needed:
    """The weights of a model.

    Attributes:
        shapes: The shape of each weight by its name in the model's ``state_dict()``.
        floats: The names of those whose elements are floating-point numbers.
        tied: For the name of each weight that is the same as an earlier one, the name of that.
    """

    shapes: Mapping[str, tuple[int, ...]]
    floats: frozenset[str]
    tied: Mapping[str, str]


def needed_by(config: Any) -> Needed:
    """The weights that the model of a configuration of transformers needs.

    Args:
        config: A ``PreTrainedConfig`` whose first architecture is a class of transformers. It is not changed.

    Raises:
        DatastatesError: transformers has no such class, or cannot build it.
    """
    architecture = next(iter(getattr(config, "architectures", None) or ()), None)
    made = getattr(transformers, architecture or "", None)
    if not (isinstance(made, type) and issubclass(made, transformers.PreTrainedModel)):
        raise DatastatesError(
            f"architectures: transformers {transformers.__version__} has no model {architecture!r}, "
            "so which weights it needs is unknown: export the checkpoint to safetensors"
        )
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    try:
        with torch.device("meta"):
            model: Any = made(config)
        model.tie_weights()
    except Exception as error:  # whatever its code raises
        raise DatastatesError(f"transformers cannot build {architecture}: {type(error).__name__}: {error}") from error
    weights = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(weight), name) for name, weight in weights.items()}
    return Needed(
        {name: tuple(weight.shape) for name, weight in weights.items()},
        frozenset(name for name, weight in weights.items() if weight.is_floating_point()),
        {name: other for name, other in names.items() if name != other},
    )
