"""How cases train a module: its outputs are the loss, and an optimizer steps its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from subject import Subject
from torch import nn

Inputs = Sequence[Callable[[], Any]] | Mapping[str, Callable[[], Any]]
"""One function for each argument of a module's forward pass, which makes it of random numbers; by name, or in order."""


def floats(*shape: int) -> Callable[[], torch.Tensor]:
    """Makes normal numbers of a shape."""
    return lambda: torch.randn(shape)


def ints(high: int, *shape: int) -> Callable[[], torch.Tensor]:
    """Makes integers from 0 to ``high - 1`` of a shape."""
    return lambda: torch.randint(0, high, shape)


def training(
    module: nn.Module,
    inputs: Inputs,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    **others: Any,
) -> Subject:
    """A module and its optimizer, if it has parameters; ``others`` are saved, too, and not trained."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    objects: dict[str, Any] = {"model": module}
    if parameters:
        make = optimizer or (lambda given: torch.optim.SGD(given, lr=0.05, momentum=0.9))
        objects["optimizer"] = make(parameters)

    def train() -> object:
        out = called(module, inputs)
        loss = total(out)
        if "optimizer" in objects and loss.requires_grad:
            objects["optimizer"].zero_grad()
            loss.backward()
            objects["optimizer"].step()
        return out, loss

    return Subject({**objects, **others}, train)


def called(module: nn.Module, inputs: Inputs) -> Any:
    """What a module gives for new inputs."""
    if isinstance(inputs, Mapping):
        return module(**{name: make() for name, make in inputs.items()})
    return module(*(make() for make in inputs))


def total(out: Any) -> torch.Tensor:
    """A loss of all floating-point tensors in what a module gives."""
    parts = [t.float().square().mean() for t in tensors(out) if t.is_floating_point() and not t.is_quantized]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
