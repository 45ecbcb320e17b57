"""Time the ``snapshot()`` call for a state whose structure has not changed since the last snapshot."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import datastates as ds
from datastates.providers import HostTensorProvider, from_stateful
from datastates.state.provider import StateProvider
from measure import Plan, Result, Sample, interleave
from states import many_small

ELEMENTS = 64


def module_and_optimizer(tensors: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A module and its Adam with about ``tensors`` tensors in all: the optimizer has three for each parameter."""
    model = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(tensors // 8))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def run(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    """Measure one provider with few and with many tensors, and a module with its optimizer."""
    few, many = (200, 1_000) if tiny else (2_000, 100_000)
    model, optimizer = module_and_optimizer(few)
    states = {n: many_small(n, ELEMENTS) for n in (few, many)}
    small, large = (_provider(state) for state in states.values())
    update_small, update_large = (partial(_add, list(state.values())) for state in states.values())

    def both() -> list[StateProvider]:
        return [from_stateful("model", model), from_stateful("optimizer", optimizer)]

    same = both()
    cases: dict[str, tuple[Callable[[], list[StateProvider]], Callable[[], object]]] = {
        "few": (lambda: small, update_small),
        "many": (lambda: large, update_large),
        "few, untouched": (lambda: small, lambda: None),
        "module and optimizer": (lambda: same, optimizer.step),
        "module and optimizer, new providers": (both, optimizer.step),
    }
    result = Result(
        parameters={"few": few, "many": many, "elements": ELEMENTS},
        settings={
            "few": f"HostTensorProvider, {few:,} tensors, after an update of all of them",
            "many": f"HostTensorProvider, {many:,} tensors, after an update of all of them",
            "few, untouched": "those of the first line, which nothing has touched while the others were saved",
            "module and optimizer": "from_stateful twice, after the optimizer's step",
            "module and optimizer, new providers": "the same, the provider objects made anew in each call",
            "state_dict() alone": "what torch itself takes of the two lines above",
        },
    )
    with contextlib.ExitStack() as stack:
        actions: dict[str, Callable[[], Sample]] = {}
        for name, (providers, update) in cases.items():
            checkpointer = stack.enter_context(ds.Checkpointer(directory / name, keep_last=1))
            actions[name] = partial(_call, checkpointer, providers, update)
        actions["state_dict() alone"] = partial(_state_dicts, model, optimizer)
        interleave(result, actions, plan)
    return result


def _provider(state: dict[str, torch.Tensor]) -> list[StateProvider]:
    return [HostTensorProvider("state", state, lazy=True)]


def _add(tensors: list[torch.Tensor]) -> None:
    """Update all tensors in place with one foreach call, as an optimizer does."""
    torch._foreach_add_(tensors, 1.0)


def _call(
    checkpointer: ds.Checkpointer, providers: Callable[[], list[StateProvider]], update: Callable[[], object]
) -> Sample:
    step = (checkpointer.latest() or 0) + 1
    update()
    begin = time.perf_counter()
    snapshot = checkpointer.snapshot(providers(), step=step)
    seconds = time.perf_counter() - begin
    snapshot.wait_committed()
    return {"seconds": seconds}


def _state_dicts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Sample:
    begin = time.perf_counter()
    model.state_dict()
    optimizer.state_dict()
    return {"seconds": time.perf_counter() - begin}
