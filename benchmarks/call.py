"""The ``snapshot()`` call itself: how long training waits for it, the structure being that of the snapshot before."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import datastates as ds
from datastates.protocol import StateProvider
from datastates.providers import HostTensorProvider, from_stateful
from measure import Plan, Result, Sample, interleave
from states import many_small

ELEMENTS = 64


def module_and_optimizer(tensors: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A module and its Adam of about so many tensors together: a parameter has three more in the optimizer."""
    model = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(tensors // 8))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def run(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    """Few and many tensors of one provider, and a module with its optimizer."""
    few, many = (200, 1_000) if tiny else (2_000, 100_000)
    model, optimizer = module_and_optimizer(few)
    cases: dict[str, list[StateProvider]] = {
        "few": [HostTensorProvider("state", many_small(few, ELEMENTS))],
        "many": [HostTensorProvider("state", many_small(many, ELEMENTS))],
        "module and optimizer": [from_stateful("model", model), from_stateful("optimizer", optimizer)],
    }
    result = Result(
        parameters={"few": few, "many": many, "elements": ELEMENTS},
        settings={
            "few": f"HostTensorProvider, {few:,} tensors",
            "many": f"HostTensorProvider, {many:,} tensors",
            "module and optimizer": "from_stateful twice",
            "state_dict() alone": "what torch itself takes of the line above",
        },
    )
    with (
        ds.Checkpointer(directory / "few", keep_last=1) as a,
        ds.Checkpointer(directory / "many", keep_last=1) as b,
        ds.Checkpointer(directory / "module", keep_last=1) as c,
    ):
        actions: dict[str, Callable[[], Sample]] = {
            name: partial(_call, checkpointer, providers)
            for checkpointer, (name, providers) in zip((a, b, c), cases.items(), strict=True)
        }
        actions["state_dict() alone"] = partial(_state_dicts, model, optimizer)
        interleave(result, actions, plan)
    return result


def _call(checkpointer: ds.Checkpointer, providers: list[StateProvider]) -> Sample:
    step = (checkpointer.latest() or 0) + 1
    begin = time.perf_counter()
    snapshot = checkpointer.snapshot(providers, step=step)
    seconds = time.perf_counter() - begin
    snapshot.wait_committed()
    return {"seconds": seconds}


def _state_dicts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Sample:
    begin = time.perf_counter()
    model.state_dict()
    optimizer.state_dict()
    return {"seconds": time.perf_counter() - begin}
