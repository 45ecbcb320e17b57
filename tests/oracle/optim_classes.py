"""How each class of ``torch.optim`` and ``torch.optim.lr_scheduler`` is made, with its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from subject import Case, Subject
from torch import nn, optim
from torch.optim import lr_scheduler
from trained import floats, ints, total

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"t0": 1, "lambd": 0.1}],
    "Adadelta": [{}],
    "Adafactor": [{}, {"weight_decay": 0.1}],
    "Adagrad": [{"lr_decay": 0.1, "initial_accumulator_value": 0.1}],
    "Adam": [{}, {"lr": torch.tensor(0.01)}, {"lr": torch.tensor(0.01), "fused": True}],
    "AdamW": [{}, {"amsgrad": True, "foreach": True}],
    "Adamax": [{}],
    "LBFGS": [{"max_iter": 3, "history_size": 4}, {"max_iter": 2, "line_search_fn": "strong_wolfe"}],
    "Muon": [{}],
    "NAdam": [{}],
    "RAdam": [{}],
    "RMSprop": [{"momentum": 0.9}, {"centered": True}],
    "Rprop": [{}],
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1}],
    "SparseAdam": [{}],
}
"""By the name of the class, arguments to make it with. What is true or false in its signature is tried, too."""

NOT_HERE = {
    "capturable": "the states must be on an accelerator",
    "differentiable": "no leaf can be stepped",
    "nesterov": "needs momentum, and is among the options",
    "line_search_fn": "a name",
}
"""Options that are not tried by themselves, and why."""


def variants(name: str) -> Iterator[dict[str, Any]]:
    """Arguments to make an optimizer with: those of the table, and each flag of its signature that it takes."""
    yield from OPTIONS[name]
    for flag, parameter in inspect.signature(getattr(optim, name)).parameters.items():
        if isinstance(parameter.default, bool | None) and flag not in NOT_HERE:
            arguments = {**OPTIONS[name][0], flag: not parameter.default}
            try:
                getattr(optim, name)([nn.Parameter(torch.ones(2, 2))], **arguments)
            except (RuntimeError, ValueError):  # the class has no such implementation
                continue
            yield arguments


def model_for(name: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A module that an optimizer can step, and its input. One parameter is frozen, one gets no gradient."""
    if name == "SparseAdam":
        return nn.EmbeddingBag(9, 4, sparse=True), ints(9, 3, 4)
    model = nn.Sequential(nn.Linear(4, 4, bias=name != "Muon"), nn.Tanh(), nn.Linear(4, 4, bias=name != "Muon"))
    model[0].weight.requires_grad_(False)
    model.unused = nn.Parameter(torch.randn(2, 2))
    return model, floats(3, 4)


def subject_of(name: str, arguments: dict[str, Any]) -> Subject:
    """A module and an optimizer; all parameters, or those of two groups with different rates."""
    model, inputs = model_for(name)
    copied = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
    parameters = list(model.parameters())
    given: Any = parameters
    if name not in ("LBFGS", "SparseAdam"):  # LBFGS takes one group
        given = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.02, "note": ["own", 1]}]
    optimizer = getattr(optim, name)(given, **copied)
    return stepped(model, optimizer, inputs)


def stepped(model: nn.Module, optimizer: Any, inputs: Callable[[], torch.Tensor], **others: Any) -> Subject:
    """A module, its optimizer and others, which are called after the step: schedulers."""

    def train() -> object:
        x = inputs()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = total(model.forward(x))
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        for other in others.values():
            other.step(*([loss] if isinstance(other, lr_scheduler.ReduceLROnPlateau) else []))
        return loss, model.forward(x)

    return Subject({"model": model, "optimizer": optimizer, **others}, train)


def optimizer_cases() -> list[Case]:
    """A case for each class and its options."""
    return [
        Case(f"{name}-{'-'.join(f'{k}={v}' for k, v in given.items()) or 'plain'}", partial(subject_of, name, given))
        for name in OPTIONS
        if hasattr(optim, name)
        for given in variants(name)
    ]


class Rate:
    """A rate that an object computes, which ``LambdaLR`` saves the attributes of."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.9**epoch


def _chained(optimizer: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


def _sequential(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 5)]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "ChainedScheduler": _chained,
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=True),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [Rate(), lambda epoch: 0.8**epoch]),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3], 0.5),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, Rate()),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SequentialLR": _sequential,
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, 0.01, 3),
}
"""By the name of the class: how it is made for an optimizer."""

ABSTRACT_SCHEDULERS = {"LRScheduler", "_LRScheduler"}


def scheduler_subject(name: str) -> Subject:
    """A module, an optimizer of two groups, and a scheduler."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    optimizer = optim.SGD(groups, lr=0.1, momentum=0.9)
    return stepped(model, optimizer, floats(3, 4), scheduler=SCHEDULERS[name](optimizer))


def scheduler_cases() -> list[Case]:
    """A case for each class."""
    return [Case(name, partial(scheduler_subject, name)) for name in SCHEDULERS]
