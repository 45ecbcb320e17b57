"""Composite providers find what any rank saved, as their parts do by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_state import SMALL

import datastates as ds
from datastates.providers import (
    CompositeProvider,
    FlatLayout,
    HostTensorProvider,
    Partition,
    ReplicatedProvider,
    ShardedZeroProvider,
    from_state_dict,
    from_stateful,
)
from datastates.testing import equal


def _composite(make: Any, values: dict[str, torch.Tensor]) -> CompositeProvider:
    return CompositeProvider("all", [CompositeProvider("inner", [make("child", values)]), from_state_dict("n", {})])


def _replicated(name: str, values: dict[str, torch.Tensor]) -> ReplicatedProvider:
    return ReplicatedProvider(HostTensorProvider(name, values), [0])


def _in_list(name: str, values: dict[str, torch.Tensor]) -> Any:
    return from_state_dict(name, {"inner": dict(values)})


def _restore(threads: Any, directory: Path, provider: ds.StateProvider, strict: bool) -> Any:
    """Restore on one rank."""

    def one(rank: int) -> Any:
        with ds.Checkpointer(directory, **SMALL) as ckpt:
            return ckpt.restore([provider], strict=strict)

    (outcome,) = threads(1, one)
    assert isinstance(outcome, ds.Restored), outcome
    return outcome


@pytest.mark.parametrize("make", [HostTensorProvider, _replicated, from_state_dict, _in_list])
@pytest.mark.parametrize("strict", [True, False])
def test_what_two_ranks_saved_is_restored_by_one(make: Any, strict: bool, threads: Any, tmp_path: Path) -> None:
    whole = {f"w{i}": torch.arange(3.0 + i) for i in range(4)}

    def begin(rank: int) -> None:
        part = {key: value for i, (key, value) in enumerate(whole.items()) if i % 2 == rank}
        kept = HostTensorProvider if make is _replicated else make
        ds.snapshot([_composite(kept, part)], tmp_path / "step-00000001", step=1, **SMALL).wait_committed()

    assert threads(2, begin) == [None] * 2
    live = {key: torch.zeros_like(value) for key, value in whole.items()}
    restored = _restore(threads, tmp_path, _composite(make, live), strict)
    assert (restored.missing_keys, restored.unexpected_keys) == ([], [])
    assert equal(live, whole)


def test_states_that_two_ranks_saved_key_by_key_are_restored_by_one(threads: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(5)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    states = optimizer.state_dict()["state"]

    def begin(rank: int) -> None:
        """Each rank has half of the flattened parameters: one of them."""
        layout = FlatLayout.concatenated([(0, (5,)), (1, (5,))], rank, 2)
        master = torch.nn.Parameter(parameters[rank].detach().clone())
        flat = torch.optim.AdamW([master])
        flat.state[master] = {k: v.clone() for k, v in states[rank].items()}
        zero = ShardedZeroProvider("optim", [Partition(layout, parameter=master)], optimizer=flat)
        ds.snapshot([CompositeProvider("all", [zero])], tmp_path / "step-00000001", step=1, **SMALL).wait_committed()

    assert threads(2, begin) == [None] * 2
    other = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone()) for p in parameters])
    _restore(threads, tmp_path, CompositeProvider("all", [from_stateful("optim", other)]), True)
    assert equal(dict(other.state_dict()["state"]), dict(states))
