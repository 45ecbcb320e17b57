"""The gate holds in compiled steps, and Dynamo never traces into it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hold import GATE, held

import datastates as ds
from datastates.executor.jobs import WriteJob
from datastates.providers import from_stateful

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("default")  # torch warns while it compiles

OPTIONS: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB", "io_threads": 1}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


class Training:
    """A model of 4 MiB and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(4, 512)).square().sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()


def _step_alone(training: Training) -> Callable[[], None]:
    step = torch.compile(training.optimizer.step, backend="eager")

    def run() -> None:
        training.backward()
        step()

    return run


def _whole(training: Training) -> Callable[[], None]:
    return torch.compile(training.step, backend="eager")  # type: ignore[no-any-return]


def _backward_too(training: Training) -> Callable[[], None]:
    whole = torch.compile(training.step, backend="eager")

    def run() -> None:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            whole()

    return run


@pytest.mark.long
@pytest.mark.parametrize("before", [False, True], ids=["first", "compiled before"])
@pytest.mark.parametrize("compiled", [_step_alone, _whole, _backward_too])
def test_the_gate_holds_in_compiled_steps(
    compiled: Callable[[Training], Callable[[], None]], before: bool, tmp_path: Path
) -> None:
    training = Training()
    step = compiled(training)
    if before:
        step()
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        for number in range(3):
            expected = copy.deepcopy(dict(training.model.state_dict()))
            with held(until=GATE):
                snapshot = ckpt.snapshot([from_stateful("model", training.model)], step=number)
                step()
            snapshot.wait_committed()
            assert snapshot.report.gate_seconds > 0
            assert not torch.equal(training.model[0].weight, expected["0.weight"])
            found = ds.load(tmp_path)["model"]
            assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_what_fails_in_the_gate_fails_the_snapshot_and_not_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> Any:
        raise LookupError("no stream")

    training = Training()
    before = copy.deepcopy(dict(training.model.state_dict()))
    with ds.Checkpointer(tmp_path, on_error="warn", **OPTIONS) as ckpt:
        with held(until=(WriteJob, "abort")):
            snapshot = ckpt.snapshot([from_stateful("model", training.model)], step=1)
            with monkeypatch.context() as patch:
                patch.setattr("datastates.state.devices.consumer_streams", fail)
                training.step()
        with pytest.raises(LookupError, match="no stream"):
            snapshot.wait_committed()
        assert "no stream" in caplog.text
        assert not torch.equal(training.model[0].weight, before["0.weight"])
        ckpt.snapshot([from_stateful("model", training.model)], step=2).wait_committed()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]
