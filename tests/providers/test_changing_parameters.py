"""Parameters that change outside of an optimizer's step are copied at once, where that is known."""

from __future__ import annotations

import copy
import ctypes
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hold import held
from torch import nn
from torch.optim.swa_utils import AveragedModel

import datastates as ds
from datastates.errors import TornSnapshotError
from datastates.providers import CompositeProvider, ReplicatedProvider, from_state_dict, from_stateful


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
    model[0].requires_grad_(False)
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


def test_an_average_inside_of_a_trained_module_is_copied() -> None:
    """It is frozen, as a teacher is, and no optimizer holds it."""
    student = nn.Linear(2, 2)
    whole = nn.ModuleDict({"student": student, "teacher": AveragedModel(student).requires_grad_(False)})
    optim = from_stateful("optim", torch.optim.SGD(student.parameters()))
    found = _lazy(from_stateful("m", whole), optim)
    parameters = {name for name, _ in whole.named_parameters()}
    assert {name for name in parameters if found[name]} == {"student.weight", "student.bias"}


def test_a_trainable_parameter_that_no_saved_optimizer_steps_is_copied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[2].weight.requires_grad_(False)
    provider = from_stateful("m", model)
    assert all(_lazy(provider).values())  # nothing is known of optimizers
    optim = from_stateful("optim", torch.optim.SGD(model[1].parameters()))
    for _ in range(2):
        assert _lazy(provider, optim) == {
            "0.weight": False, "0.bias": False, "1.weight": True, "1.bias": True, "2.weight": True
        }  # fmt: skip
    every = from_stateful("every", torch.optim.SGD(model[0].parameters()))
    assert all(_lazy(provider, optim, every).values())
    assert all(_lazy(from_stateful("m", model, lazy=lambda _: True), optim).values())


HOOKS = {
    "register_hook": nn.Parameter.register_hook,
    "register_post_accumulate_grad_hook": nn.Parameter.register_post_accumulate_grad_hook,
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("partly", [False, True])
def test_parameters_with_hooks_on_their_gradients_are_copied(register: Any, partly: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    hook = functools.partial(print, "gradient") if partly else lambda _: None
    hooks = [register(p, hook) for p in model[0].parameters()]
    optim = from_stateful("optim", optimizer)
    expected = {"0.weight": False, "0.bias": False, "1.weight": True, "1.bias": True}
    for others in ((), (optim,)):
        assert _lazy(from_stateful("m", model), *others) == expected
    by_name = from_state_dict("m", dict(model.named_parameters()))
    for _ in range(2):
        assert _lazy(by_name) == expected
    assert not any(_lazy(optim).values())  # the hooks may change the states, too
    assert all(_lazy(from_stateful("optim", optimizer, lazy=lambda key: key.startswith("state/"))).values())
    for one in hooks:
        one.remove()
    assert all(_lazy(from_stateful("m", model)).values())
    assert any(_lazy(from_stateful("optim", optimizer)).values())


def test_torchs_own_hooks_on_gradients_only_send_them() -> None:
    model = nn.Linear(2, 2)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(torch.distributed.fsdp._runtime_utils._post_backward_hook)
    assert all(_lazy(from_stateful("m", model)).values())


def test_parameters_that_other_processes_share_are_copied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].share_memory()
    assert [*_lazy(from_stateful("m", model)).values()] == [True, True, False, False]


class Table(nn.Module):
    """Updates rows of its parameter in native code inside ``backward()``, as fbgemm's tables do."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weights_host = nn.Parameter(torch.randn(rows, 4))

    def backward(self) -> None:
        table = self.weights_host.detach()
        for row in (3, len(table) // 2 + 1):
            ctypes.memset(table.data_ptr() + row * 16, 0, 16)


@pytest.fixture(params=["fbgemm_gpu.split_table_batched_embeddings_ops_training", "torchrec.distributed.types"])
def table(request: pytest.FixtureRequest) -> Table:
    kind = type("ShardedModule", (Table,), {"__module__": request.param})
    made: Table = kind(100_000)
    return made


def test_tables_that_update_themselves_are_copied(table: Table, tmp_path: Path) -> None:
    model = nn.ModuleDict({"table": table, "top": nn.Linear(4, 1)})
    model["slice"] = nn.ParameterList([nn.Parameter(table.weights_host.detach()[4:8])])  # as torchrec names parts of it
    optimizer = torch.optim.AdamW(model.parameters())  # holds the table, and never gets a gradient of it
    providers = [from_stateful("model", model), from_stateful("optim", optimizer)]
    for known in ([], providers[1:]):
        lazy = _lazy(from_stateful("model", model), *known)
        assert [key for key, is_lazy in lazy.items() if is_lazy] == ["top.weight", "top.bias"]
    _compare_with_stock(model, providers, table.backward, tmp_path)


def _compare_with_stock(model: nn.Module, providers: list[Any], update: Callable[[], object], folder: Path) -> None:
    """Save, update before the capture, and compare the file with what ``torch.save`` would have written."""
    stock = io.BytesIO()
    torch.save(model.state_dict(), stock)
    with ds.Checkpointer(folder / "c", host_cache="64MiB") as checkpointer:
        with held("capture"):
            snapshot = checkpointer.snapshot(providers, step=1)
            update()
        snapshot.wait_committed()
    stock.seek(0)
    wanted, found = torch.load(stock), ds.load(folder / "c")["model"]
    assert not torch.equal(next(iter(wanted.values())), next(iter(model.state_dict().values())))
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def test_rows_that_a_hook_updates_in_backward_are_saved_as_they_were(tmp_path: Path) -> None:
    model = nn.Sequential(nn.EmbeddingBag(100_000, 4), nn.Linear(4, 1))

    def update(parameter: nn.Parameter) -> None:  # as in LOMO: neither a step() nor torch's counter sees it
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def backward() -> None:
        model(torch.tensor([[7, 50_001]])).sum().backward()

    backward()
    _compare_with_stock(model, [from_stateful("model", model)], backward, tmp_path)


def test_a_clamp_of_data_without_an_optimizers_step(tmp_path: Path) -> None:
    model = nn.Sequential(nn.EmbeddingBag(100_000, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.clamp_(-1, 1)[77_777] = 3
    optimizer = torch.optim.AdamW(model[1].parameters())
    providers = [from_stateful("model", model), from_stateful("optim", optimizer)]
    _compare_with_stock(model, providers, lambda: model[0].weight.data.clamp_(-1, 1), tmp_path)


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
