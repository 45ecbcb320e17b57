"""Modules that torch wraps, parametrizes, prunes, averages or makes lazily."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from nn_classes import ENTRIES
from optim_classes import stepped
from subject import Case, Subject
from torch import nn, optim
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import swa_utils
from trained import floats, total, training


class Doubled(nn.Module):
    """A parametrization that can be undone, so that a weight can be assigned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


class Symmetric(nn.Module):
    """A parametrization that has a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return (x + x.T) / 2


def _twice(module: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "weight", Doubled())
    parametrize.register_parametrization(module, "weight", Symmetric())
    return module


def _pruned(module: nn.Module) -> nn.Module:
    prune.random_unstructured(module, "weight", 0.3)
    prune.l1_unstructured(module, "weight", 0.2)
    return module


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": partial(parametrizations.orthogonal, orthogonal_map="cayley"),
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "two parametrizations": _twice,
    "pruned": _pruned,
    "half": lambda module: module.to(torch.bfloat16).register_forward_pre_hook(_to_half) and module,  # type: ignore[func-returns-value]
    "double": lambda module: module.double().register_forward_pre_hook(_to_double) and module,  # type: ignore[func-returns-value]
    "data parallel": nn.DataParallel,
    "compiled": lambda module: torch.compile(module, backend="eager"),  # type: ignore[return-value]
}


def _to_half(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return tuple(x.bfloat16() for x in args)


def _to_double(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return tuple(x.double() for x in args)


def wrapped(name: str) -> Subject:
    """A wrapped layer between two others."""
    middle = WRAPPERS[name](nn.Linear(4, 4))
    layers = [nn.Linear(4, 4), middle, nn.Linear(4, 4)]
    layers[2] = layers[2].to(next(middle.parameters()).dtype)
    return training(nn.Sequential(*layers), [floats(3, 4)])


def lazy(name: str, *, called: bool) -> Subject:
    """A lazy module without an optimizer, which has seen an input or not."""
    entry = ENTRIES[name]
    module = entry.module(name)
    if called:
        module(*(make() for make in entry.inputs))
    return Subject({"model": module}, lambda: module(*(make() for make in entry.inputs)))


class TiedEnds(nn.Module):
    """The weight of the last layer is that of the first; the bias is a view of a buffer; some buffers are no state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.last.weight = self.first.weight
        self.again = self.last
        self.register_buffer("counts", torch.zeros(9))
        self.register_buffer("view", self.counts[2:5])
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("none", None)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        self.counts += torch.bincount(index.flatten(), minlength=9)
        self.scratch += 1
        return self.again(self.first(index))


def tied() -> Subject:
    """Parameters in two places."""
    model = TiedEnds()
    return training(model, [lambda: torch.randint(0, 9, (3,))], lambda given: optim.AdamW(given, 0.05))


def averaged(**options: Any) -> Subject:
    """A module, its average and the scheduler of the last phase, as stochastic weight averaging has them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    average = swa_utils.AveragedModel(model, **options)
    optimizer = optim.SGD(model.parameters(), 0.1)
    subject = stepped(model, optimizer, floats(3, 4), scheduler=swa_utils.SWALR(optimizer, 0.01, 3))
    train = subject.train

    def both() -> object:
        out = train()
        average.update_parameters(model)
        return out

    return Subject({**subject.objects, "average": average}, both)


def scaled(**options: Any) -> Subject:
    """A scaler of gradients beside a module and its optimizer."""
    model, scaler = nn.Linear(4, 4), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, **options)
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def train() -> object:
        optimizer.zero_grad()
        out = model(torch.randn(3, 4))
        scaler.scale(total(out)).backward()
        scaler.step(optimizer)
        scaler.update()
        return out

    return Subject({"model": model, "optimizer": optimizer, "scaler": scaler}, train)


def cases() -> Iterator[Case]:
    """All of them."""
    yield from (Case(name, partial(wrapped, name)) for name in WRAPPERS)
    for name in (name for name in ENTRIES if name.startswith("Lazy")):
        yield Case(f"{name}-into-uncalled", partial(lazy, name, called=True), partial(lazy, name, called=False))
        yield Case(f"{name}-uncalled", partial(lazy, name, called=False))
    yield Case("tied", tied)
    yield Case("average", averaged, gated=False)
    yield Case(
        "average-exponential",
        partial(averaged, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True),
        gated=False,
    )
    yield Case("scaler", scaled)
    yield Case("scaler-disabled", partial(scaled, enabled=False))
    yield Case("scaler-disabled-into-enabled", partial(scaled, enabled=False), scaled)
    yield Case("scaler-into-disabled", scaled, partial(scaled, enabled=False))
