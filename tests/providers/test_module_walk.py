"""The state of an unchanged module is read without ``state_dict()``; whatever changes it is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates as ds
from datastates.providers import from_stateful


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("left", torch.ones(2), persistent=False)
        self.register_parameter("none", None)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()
        self.tied = self.first.weight
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.nothing = None


def patched(self: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
    destination[prefix + "patched"] = torch.full((2,), 7.0)


def rename(model: Any) -> None:
    inner = model.second
    inner._parameters["renamed"] = inner._parameters.pop("weight")


def reorder(model: Any) -> None:
    model._modules["first"] = model._modules.pop("first")


def other_class(model: Any) -> None:
    class Other(Inner):
        def get_extra_state(self) -> Any:
            return {"count": 3}

    model.second.__class__ = Other


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda model: None,
    "contents": lambda model: model.first.weight.data.fill_(5),
    "memory": lambda model: setattr(model.first.weight, "data", torch.full((3,), 6.0)),
    "a parameter": lambda model: setattr(model.first, "weight", nn.Parameter(torch.full((3,), 4.0))),
    "a shape": lambda model: setattr(model.first, "weight", nn.Parameter(torch.full((5,), 4.0))),
    "a parameter more": lambda model: model.second.register_parameter("none", nn.Parameter(torch.ones(1))),
    "a parameter less": lambda model: model.second.register_parameter("weight", None),
    "a buffer": lambda model: setattr(model.first, "kept", torch.full((2,), 9.0)),
    "a buffer that is kept now": lambda model: model.first._non_persistent_buffers_set.clear(),
    "a buffer that is left out now": lambda model: model.first._non_persistent_buffers_set.add("kept"),
    "a name": rename,
    "an order": reorder,
    "a submodule": lambda model: setattr(model, "second", nn.Linear(1, 1)),
    "a submodule more": lambda model: model.layers.append(nn.Linear(2, 1)),
    "a class": other_class,
    "a hook": lambda model: model.second._register_state_dict_hook(
        lambda module, state, prefix, meta: state.update({prefix + "hooked": torch.ones(1)})
    ),
    "a hook before": lambda model: model.second.register_state_dict_pre_hook(
        lambda module, prefix, keep_vars: module.kept.fill_(8)
    ),
    "a method of an object": lambda model: setattr(
        model.second, "_save_to_state_dict", lambda destination, prefix, keep_vars: None
    ),
    "a version": lambda model: setattr(model.second, "_version", 9),
}


def saved(path: Path) -> Any:
    return ds.load(path)["model"]


def assert_equal(found: Any, wanted: Any) -> None:
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value.detach()), key
        else:
            assert found[key] == value, key
    assert found._metadata == wanted._metadata


@pytest.mark.parametrize("change", CHANGES)
def test_the_saved_state_is_the_one_of_state_dict(change: str, tmp_path: Path) -> None:
    model = Model()
    provider = from_stateful("model", model)
    with ds.Checkpointer(tmp_path) as checkpointer:
        for step in range(2):
            checkpointer.snapshot([provider], step=step).wait_committed()
        CHANGES[change](model)
        for step in range(2, 4):
            snapshot = checkpointer.snapshot([provider], step=step)
            snapshot.wait_committed()
            assert_equal(saved(snapshot.path), model.state_dict())


def test_a_patched_method_of_torch_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    provider = from_stateful("model", model)
    with ds.Checkpointer(tmp_path) as checkpointer:
        for step in range(2):
            checkpointer.snapshot([provider], step=step).wait_committed()
        monkeypatch.setattr(nn.Module, "_save_to_state_dict", patched)
        snapshot = checkpointer.snapshot([provider], step=2)
        snapshot.wait_committed()
        assert_equal(saved(snapshot.path), model.state_dict())


def test_an_unchanged_module_is_not_asked_for_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = nn.Module.state_dict

    def state_dict(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(self)
        return real(self, *args, **options)

    monkeypatch.setattr(nn.Module, "state_dict", state_dict)
    model = Model()
    with ds.Checkpointer(tmp_path) as checkpointer:
        for step in range(3):  # new providers, too
            checkpointer.snapshot([from_stateful("model", model)], step=step).wait_committed()
            calls, before = [], calls
        assert before == []
