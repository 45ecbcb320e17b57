"""A restored optimizer is as ``load_state_dict`` leaves it, but for what torch's own loses: types, and names."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates as ds
from datastates.errors import ProviderError, RestoreError
from datastates.providers import from_stateful
from datastates.testing import equal


class _Master(torch.optim.Optimizer):
    """Keeps its states in float32, whatever the parameters are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["step"], state["parts"] = 0, {"mean": torch.zeros_like(parameter, dtype=torch.float32)}
                state["master"], state["signs"] = parameter.float(), [torch.zeros(3, dtype=torch.uint8)]
            state["step"] += 1
            state["parts"]["mean"].lerp_(parameter.grad.float(), 0.1)
            state["master"].sub_(state["parts"]["mean"] * 0.01)
            state["signs"][0].add_(1)
            parameter.copy_(state["master"])


def _trained(kind: Any, seed: int, dtype: torch.dtype, steps: int = 3) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 4, dtype=dtype)
    optimizer = kind(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4, dtype=dtype)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("steps", [0, 2])
def test_states_keep_their_types(steps: int, tmp_path: Path) -> None:
    source, live = _trained(_Master, 1, torch.bfloat16)[1], _trained(_Master, 2, torch.bfloat16, steps)[1]
    ds.snapshot([from_stateful("o", source)], tmp_path / "c").wait_committed()
    ds.restore([from_stateful("o", live)], tmp_path / "c")
    assert equal(live.state_dict(), source.state_dict())


def test_states_of_torchs_own_take_the_type_of_their_parameters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = _trained(torch.optim.AdamW, 1, torch.float32)[1]
    stock, live = (_trained(torch.optim.AdamW, 2, torch.bfloat16, 0)[1] for _ in range(2))
    stock.load_state_dict(source.state_dict())
    ds.snapshot([from_stateful("o", source)], tmp_path / "c").wait_committed()
    with caplog.at_level(logging.WARNING, "datastates"):
        ds.restore([from_stateful("o", live)], tmp_path / "c")
    assert equal(live.state_dict(), stock.state_dict())
    (said,) = caplog.messages
    assert "'o'" in said
    assert "'exp_avg': 'float32 to bfloat16'" in said


class _Net(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(3, 3, bias=False))


def _named(names: str, groups: list[str], seed: int, steps: int) -> tuple[_Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = _Net(names)
    named = dict(net.named_parameters())
    split = [{"params": [(f"{n}.weight", named[f"{n}.weight"]) for n in group]} for group in groups]
    optimizer = torch.optim.AdamW(split)
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.1 * (number + 1)
    for _ in range(steps):
        sum(getattr(net, n)(torch.randn(2, 3)).square().sum() for n in names).backward()  # type: ignore[attr-defined]
        optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("groups", [["yxz"], ["z", "yx"], ["yx", "z"]])
def test_states_go_to_the_parameters_of_their_names(groups: list[str], steps: int, tmp_path: Path) -> None:
    saved = ["xyz"] if len(groups) == 1 else ["xy", "z"]
    net, optimizer = _named("xyz", saved, 1, 2)
    other, live = _named("yxz", groups, 2, steps)
    ds.snapshot([from_stateful("o", optimizer)], tmp_path / "c").wait_committed()
    ds.restore([from_stateful("o", live)], tmp_path / "c")
    for name in "xyz":
        ours, theirs = live.state[getattr(other, name).weight], optimizer.state[getattr(net, name).weight]
        assert equal(dict(ours), dict(theirs))
    rates = {name: g["lr"] for g in live.param_groups for name in g["param_names"]}
    assert rates == {name: g["lr"] for g in optimizer.param_groups for name in g["param_names"]}
    assert [g["param_names"] for g in live.param_groups] == [[f"{n}.weight" for n in group] for group in groups]


def test_names_in_other_groups_are_refused(tmp_path: Path) -> None:
    optimizer, live = _named("xyz", ["xy", "z"], 1, 2)[1], _named("xyz", ["xz", "y"], 2, 1)[1]
    ds.snapshot([from_stateful("o", optimizer)], tmp_path / "c").wait_committed()
    before = live.state_dict()
    with pytest.raises(RestoreError, match=r"'o/param_groups'.*'z.weight'.*other places"):
        ds.restore([from_stateful("o", live)], tmp_path / "c")
    assert equal(live.state_dict(), before)


def test_other_names_in_the_same_order_are_as_for_torch(tmp_path: Path) -> None:
    optimizer, live = _named("xyz", ["xyz"], 1, 2)[1], _named("abc", ["abc"], 2, 0)[1]
    ds.snapshot([from_stateful("o", optimizer)], tmp_path / "c").wait_committed()
    ds.restore([from_stateful("o", live)], tmp_path / "c")
    assert equal(live.state_dict(), optimizer.state_dict())


class _Scaling(torch.optim.Adam):
    """Takes its states in a form of its own."""

    def state_dict(self) -> Any:
        return {"inner": super().state_dict(), "scale": torch.tensor(2.0)}

    def load_state_dict(self, state_dict: Any) -> None:
        self.scale = state_dict["scale"].item()
        super().load_state_dict(state_dict["inner"])


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("way", ["swapping hook", "own load", "post hook"])
def test_code_of_its_own_is_as_with_torch(way: str, steps: int, tmp_path: Path) -> None:
    kind = _Scaling if way == "own load" else torch.optim.Adam
    source = _trained(kind, 1, torch.float32)[1]
    stock, live = (_trained(kind, 2, torch.float32, steps)[1] for _ in range(2))

    def swap(_: Any, state: Any) -> Any:
        states = {n: {**s, "exp_avg": s["exp_avg_sq"], "exp_avg_sq": s["exp_avg"]} for n, s in state["state"].items()}
        for some in states.values():
            some["exp_avg"].copy_(some["exp_avg"] + some["exp_avg_sq"])
        return {**state, "state": states}

    seen: list[Any] = []
    for optimizer in (stock, live) if way == "swapping hook" else ():
        optimizer.register_load_state_dict_pre_hook(swap)
    for optimizer in (stock, live) if way == "post hook" else ():
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    torch.save(source.state_dict(), tmp_path / "t.pt")
    stock.load_state_dict(torch.load(tmp_path / "t.pt"))
    ds.snapshot([from_stateful("o", source)], tmp_path / "c").wait_committed()
    ds.restore([from_stateful("o", live)], tmp_path / "c")
    assert equal(live.state_dict(), stock.state_dict())
    assert getattr(live, "scale", None) == getattr(stock, "scale", None)
    assert seen == ([2, 2] if way == "post hook" else [])


class _Swapping:
    """An object whose load writes into its tensors, one from the other."""

    def __init__(self, fill: float) -> None:
        self.a, self.b = torch.full((3,), fill), torch.full((3,), -fill)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"a": self.a, "b": self.b}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.a.copy_(state["b"])
        self.b.copy_(state["a"])


def test_an_object_is_not_given_its_own_memory(tmp_path: Path) -> None:
    source, live = _Swapping(1), _Swapping(2)
    ds.snapshot([from_stateful("s", source)], tmp_path / "c").wait_committed()
    ds.restore([from_stateful("s", live)], tmp_path / "c")
    assert [live.a[0].item(), live.b[0].item()] == [-1, 1]


def test_a_scaler_that_was_saved_disabled_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    source, live = nn.Linear(2, 2), nn.Linear(2, 2)
    disabled, enabled = torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")
    ds.snapshot([from_stateful("m", source), from_stateful("scaler", disabled)], tmp_path / "c").wait_committed()
    providers = [from_stateful("m", live), from_stateful("scaler", enabled)]
    assert not ds.compare(providers, tmp_path / "c").fits
    before = live.weight.detach().clone()
    with pytest.raises(RestoreError, match="'scaler': a disabled GradScaler was saved"):
        ds.restore(providers, tmp_path / "c")
    assert torch.equal(live.weight, before)
    ds.restore([from_stateful("m", live), from_stateful("scaler", disabled)], tmp_path / "c")
    restored = ds.restore(providers, tmp_path / "c", strict=False)
    assert list(restored.mismatched_keys) == ["scaler"]
    assert torch.equal(live.weight, source.weight)


def test_an_object_that_refuses_is_named(tmp_path: Path) -> None:
    class Refusing:
        def state_dict(self) -> dict[str, int]:
            return {"x": 1}

        def load_state_dict(self, state: Any) -> None:
            raise KeyError("y")

    ds.snapshot([from_stateful("loader", Refusing())], tmp_path / "c").wait_committed()
    with pytest.raises(ProviderError, match=r"'loader' does not take its state from .*: KeyError: 'y'") as caught:
        ds.restore([from_stateful("loader", Refusing())], tmp_path / "c")
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_rate_in_a_tensor_is_replaced_as_by_torch(tmp_path: Path) -> None:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=torch.tensor(0.5))

    source, live, stock = (_trained(adam, seed, torch.float32)[1] for seed in (1, 2, 2))
    source.param_groups[0]["lr"].fill_(0.25)
    ds.snapshot([from_stateful("o", source)], tmp_path / "c").wait_committed()
    ds.restore([from_stateful("o", live)], tmp_path / "c")
    stock.load_state_dict(source.state_dict())
    assert equal(live.state_dict(), stock.state_dict())
    assert live.defaults["lr"] == stock.defaults["lr"] == 0.5


class _Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, which never calls the base class's ``__init__``: it has no groups of its own."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.Adam(parameters, lr=0.1)
        self.scale = 8.0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.scale *= 2

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale = state_dict["scale"]
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k != "scale"})


@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizer_without_groups_of_its_own_is_as_with_torch(steps: int, tmp_path: Path) -> None:
    model, source = _trained(_Wrapper, 1, torch.float32)
    stock, live = (_trained(_Wrapper, 2, torch.float32, steps)[1] for _ in range(2))
    stock.load_state_dict(source.state_dict())
    ds.snapshot([from_stateful("m", model), from_stateful("o", source)], tmp_path / "c").wait_committed()
    ds.restore([from_stateful("o", live)], tmp_path / "c")
    assert equal(live.state_dict(), stock.state_dict())
