"""A save of parameters that should have changed and did not is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

import datastates as ds
from datastates.errors import StaleStateError
from datastates.providers import from_state_dict, from_stateful

torch = pytest.importorskip("torch")


class Loop:
    """A model that is trained, and what is handed over to be saved."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0)
        self.saved: Callable[[], list[Any]] = lambda: [
            from_stateful("model", self.model),
            from_stateful("optimizer", self.optimizer),
        ]
        self.scale = 1.0

    def step(self) -> None:
        self.optimizer.zero_grad()
        (self.model(torch.randn(4, 300)).square().mean() * self.scale).backward()
        self.optimizer.step()


def run(
    root: Path,
    loop: Loop,
    change: Callable[[Loop], object],
    on_stale: Literal["warn", "error", "ignore"] | None = "warn",
) -> None:
    with ds.Checkpointer(root, on_stale=on_stale) as checkpointer:
        for step in range(4):
            loop.step()
            if step == 1:
                change(loop)
            checkpointer.snapshot(loop.saved(), step=step).wait_committed()


def constant_loss_scale_of_zero(loop: Loop) -> None:
    loop.scale = 0.0
    loop.optimizer.state.clear()  # so that nothing moves by momentum


def offloaded_copy(loop: Loop) -> None:
    copy = {key: value.clone() for key, value in loop.model.state_dict().items()}
    loop.saved = lambda: [from_state_dict("model", copy), from_stateful("optimizer", loop.optimizer)]


def wrong_tensors(loop: Loop) -> None:
    other = Loop()
    loop.saved = lambda: [from_stateful("model", other.model), from_stateful("optimizer", loop.optimizer)]


def references_from_before_the_module_went_elsewhere(loop: Loop) -> None:
    before = dict(loop.model.state_dict())
    loop.model.to(torch.float64).to(torch.float32)
    for parameter in loop.model.parameters():
        parameter.data = parameter.data.clone()
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2)
    loop.saved = lambda: [from_state_dict("model", before)]


STALE = [constant_loss_scale_of_zero, offloaded_copy, wrong_tensors, references_from_before_the_module_went_elsewhere]


@pytest.mark.parametrize("change", STALE)
def test_it_is_told(change: Callable[[Loop], object], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, Loop(), change)
    told = [line for line in caplog.messages if "has stepped since step" in line]
    assert [line.partition(":")[0] for line in told][-1:] == ["step 3"]
    assert "AdamW" in told[-1]
    assert "'model/0.weight'" in told[-1]
    assert not any(line.startswith(("step 0", "step 1")) for line in told)


@pytest.mark.parametrize("change", [constant_loss_scale_of_zero])
def test_it_is_an_error_where_that_is_asked_for(change: Callable[[Loop], object], tmp_path: Path) -> None:
    with pytest.raises(StaleStateError, match="AdamW has stepped"):
        run(tmp_path, Loop(), change, "error")
    assert not list(tmp_path.glob("step-00000003*"))


def freeze_most(loop: Loop) -> None:
    loop.model[0].requires_grad_(False)


def warm_up(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] = 0


def stop(loop: Loop) -> None:
    loop.step = lambda: None  # type: ignore[method-assign]


def leave_out(loop: Loop) -> None:
    fixed = {"statistics": torch.ones(5)}
    loop.saved = lambda: [from_state_dict("data", fixed), from_stateful("optimizer", loop.optimizer)]


def save_an_average_too(loop: Loop) -> None:
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    loop.saved = lambda: [from_stateful("model", loop.model), from_stateful("average", average)]


def warm_up_by_a_tensor(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] = torch.tensor(0.0)


def step_without_gradients(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.step = loop.optimizer.step  # type: ignore[assignment]


def save_a_reference_too(loop: Loop) -> None:
    policy, reference = loop.model, {key: value.clone() for key, value in loop.model.state_dict().items()}
    copy = {key: value.clone() for key, value in policy.state_dict().items()}

    def saved() -> list[Any]:
        for key, value in policy.state_dict().items():
            copy[key].copy_(value)
        return [from_state_dict("policy", copy), from_state_dict("reference", reference)]

    loop.saved = saved


FINE = [freeze_most, warm_up, warm_up_by_a_tensor, stop, step_without_gradients, leave_out, save_an_average_too]


@pytest.mark.parametrize("change", [lambda loop: None, save_a_reference_too, *FINE])
def test_what_need_not_change_is_not_told(
    change: Callable[[Loop], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, Loop(), change, "error")
    assert "has stepped since" not in caplog.text


@pytest.mark.parametrize("on_stale", ["ignore", None])
def test_nothing_is_told_where_nobody_asks(
    on_stale: Literal["ignore"] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, Loop(), constant_loss_scale_of_zero, on_stale)
    assert "has stepped since" not in caplog.text


def test_it_is_told_with_incremental(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(2):
            loop.step()
            constant_loss_scale_of_zero(loop)
            checkpointer.snapshot(loop.saved(), step=step).wait_committed()
    assert "step 1: AdamW has stepped since step 0" in caplog.text
