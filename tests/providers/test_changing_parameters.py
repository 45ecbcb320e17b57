"""Parameters that change outside of an optimizer's step are copied at once, where that is known."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hold import held
from torch import nn
from torch.optim.swa_utils import AveragedModel

import datastates as ds
from datastates.errors import TornSnapshotError
from datastates.providers import CompositeProvider, ReplicatedProvider, from_stateful


def _lazy(provider: ds.StateProvider, *others: ds.StateProvider) -> dict[str, bool]:
    """Which arrays are lazy in a snapshot with other providers."""
    provider.stand_beside([provider, *others])
    return {shard.key: shard.lazy for shard in provider.shards() if not shard.is_object}


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_renormalizes_is_copied(kind: Any) -> None:
    model = nn.ModuleDict({"e": kind(8, 2, max_norm=1.0), "f": kind(8, 2), "l": nn.Linear(2, 8, bias=False)})
    assert _lazy(from_stateful("m", model)) == {"e.weight": False, "f.weight": True, "l.weight": True}
    model["l"].weight = model["e"].weight
    provider = from_stateful("m", model)
    for _ in range(2):
        assert _lazy(provider) == {"e.weight": False, "f.weight": True, "l.weight": False}
    assert all(_lazy(from_stateful("m", model, lazy=lambda _: True)).values())


def test_a_module_that_no_optimizer_holds_is_copied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    average = copy.deepcopy(model)
    kept = from_stateful("ema", average)
    assert all(_lazy(kept).values())  # nothing is known of optimizers
    optimizer = torch.optim.SGD(model[1].parameters(), momentum=0.9)
    optim = from_stateful("optim", optimizer)
    for known in (optim, ReplicatedProvider(optim), CompositeProvider("c", [optim])):
        assert all(_lazy(from_stateful("model", model), known).values())  # the frozen layers, too
        assert not any(_lazy(from_stateful("ema", average), known).values())
        wrapped = CompositeProvider("all", [ReplicatedProvider(from_stateful("ema", average))])
        assert not any(_lazy(wrapped, known).values())
        assert not any(_lazy(kept, known).values())
    assert all(_lazy(from_stateful("ema", average, lazy=lambda _: True), optim).values())
    assert all(_lazy(kept).values())


def test_torchs_average_is_copied() -> None:
    assert not any(_lazy(from_stateful("swa", AveragedModel(nn.Linear(2, 2)))).values())


def test_a_function_of_the_key_says_what_is_lazy() -> None:
    model = nn.ModuleDict({"query": nn.Linear(2, 2), "key": nn.Linear(2, 2)})
    provider = from_stateful("m", model, lazy=lambda key: not key.startswith("key."))
    assert _lazy(provider) == {
        "query.weight": True, "query.bias": True, "key.weight": False, "key.bias": False
    }  # fmt: skip


def test_an_average_and_a_renormalizing_forward_pass_before_the_gate(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(64, 8, max_norm=1.0), nn.Linear(8, 8))
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    providers = [from_stateful(n, o) for n, o in (("model", model), ("ema", average), ("optim", optimizer))]
    before = {k: v.clone() for k, v in average.state_dict().items()}
    weight = model[0].weight.detach().clone()
    with ds.Checkpointer(tmp_path / "c") as checkpointer:
        with held("capture"):
            snapshot = checkpointer.snapshot(providers, step=1)
            model(torch.arange(64)).sum().backward()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.5)
        snapshot.wait_committed()
    saved = ds.load(tmp_path / "c")
    assert all(torch.equal(saved["ema"][k], v) for k, v in before.items())
    assert torch.equal(saved["model"]["0.weight"], weight)


def test_the_error_says_what_to_do(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    with ds.Checkpointer(tmp_path / "c", on_error="warn") as checkpointer:
        with held("capture"):
            snapshot = checkpointer.snapshot([from_stateful("moco", model)], step=1)
            with torch.no_grad():
                model.weight.mul_(2)
        with pytest.raises(TornSnapshotError, match=r"'moco/weight'; call Checkpointer.gate\(\).*lazy=False"):
            snapshot.wait_committed()
