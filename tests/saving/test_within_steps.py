"""A snapshot that is taken inside an optimizer's step holds the state of that moment, as a copy made there would."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hold import held

import datastates as ds
from datastates.providers import from_stateful

torch = pytest.importorskip("torch")

OPTIONS: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB", "io_threads": 1}
"""A cache smaller than the state, so that capture cannot end before the first write has."""


class Training:
    """A model of 4 MiB, its optimizer, and what a function that is called inside a step has saved."""

    def __init__(self, checkpointer: ds.Checkpointer, make: Callable[[Any], Any]) -> None:
        self.model = torch.nn.Linear(1024, 1024)
        self.optimizer = make(self.model.parameters())
        self.checkpointer = checkpointer
        self.expected: list[Any] = []
        self.snapshots: list[ds.Snapshot] = []
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)

    def save(self, *_: object) -> None:
        self.expected.append(copy.deepcopy(self.model.state_dict()))
        providers = [from_stateful("m", self.model), from_stateful("o", self.optimizer)]
        self.snapshots.append(self.checkpointer.snapshot(providers, step=len(self.snapshots)))

    def closure(self) -> Any:
        self.save()
        return torch.zeros(())


def before(training: Training) -> Callable[[], object]:
    training.optimizer.register_step_pre_hook(training.save)
    return training.optimizer.step  # type: ignore[no-any-return]


def after(training: Training) -> Callable[[], object]:
    training.optimizer.register_step_post_hook(training.save)
    return training.optimizer.step  # type: ignore[no-any-return]


def in_closure(training: Training) -> Callable[[], object]:
    return lambda: training.optimizer.step(training.closure)


def scheduled(training: Training) -> Callable[[], object]:
    torch.optim.lr_scheduler.StepLR(training.optimizer, 1)
    return before(training)


def scaled(training: Training) -> Callable[[], object]:
    training.optimizer.register_step_pre_hook(training.save)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return lambda: scaler.step(training.optimizer)


def compiled(training: Training) -> Callable[[], object]:
    training.optimizer.register_step_pre_hook(torch.compiler.disable(training.save))
    return torch.compile(training.optimizer.step, backend="eager")  # type: ignore[no-any-return]


def accelerated(training: Training) -> Callable[[], object]:
    optimizer = pytest.importorskip("accelerate.optimizer").AcceleratedOptimizer
    training.optimizer.register_step_pre_hook(training.save)
    pytest.importorskip("accelerate").Accelerator(cpu=True)
    return optimizer(training.optimizer, device_placement=False).step  # type: ignore[no-any-return]


def own(parameters: Any) -> Any:
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0].data.add_(1)
            if closure is not None:
                closure()
            self.param_groups[0]["params"][0].data.add_(1)

    return Own(parameters)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    "own": own,
}
CASES = [("fused", before), ("foreach", before), ("own", before), ("fused", after), ("own", after)]
CASES += [("foreach", in_closure), ("LBFGS", in_closure), ("own", in_closure)]
CASES += [("foreach", scheduled), ("fused", scaled), ("foreach", accelerated), ("fused", compiled)]


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # torch warns while it compiles
@pytest.mark.parametrize(("optimizer", "arranged"), CASES)
def test_a_snapshot_inside_a_step_is_of_that_moment(
    optimizer: str, arranged: Callable[[Training], Callable[[], object]], tmp_path: Path
) -> None:
    with ds.Checkpointer(tmp_path, **OPTIONS) as checkpointer:
        training = Training(checkpointer, OPTIMIZERS[optimizer])
        step = arranged(training)
        for _ in range(3):
            step()
    assert len(training.snapshots) >= 3
    for number, (snapshot, expected) in enumerate(zip(training.snapshots, training.expected, strict=True)):
        assert snapshot.committed
        found = ds.load(tmp_path, step=number)["m"]
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_a_step_that_failed_leaves_snapshots_lazy(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a hook fails")

    with ds.Checkpointer(tmp_path, **OPTIONS) as checkpointer:
        training = Training(checkpointer, OPTIMIZERS["foreach"])
        handle = training.optimizer.register_step_pre_hook(fail)
        with pytest.raises(RuntimeError, match="a hook fails"):
            training.optimizer.step()
        handle.remove()
        with held("capture"):
            training.save()
            assert not training.snapshots[0].captured


def test_without_the_automatic_gate_a_step_is_not_waited_for(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, auto_gate=False, **OPTIONS) as checkpointer:
        training = Training(checkpointer, OPTIMIZERS["own"])

        def save(*_: object) -> None:
            with held("capture"):
                training.save()
                assert not training.snapshots[0].captured
            training.snapshots[0].wait_captured()

        training.optimizer.register_step_pre_hook(save)
        training.optimizer.step()


def test_async_save_inside_a_step_is_of_that_moment(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    adapter = pytest.importorskip("datastates.adapters.dcp")
    with ds.Checkpointer(tmp_path / "unused") as checkpointer:
        training = Training(checkpointer, OPTIMIZERS["own"])
    saved: list[Any] = []

    def save(*_: object) -> None:
        training.expected.append(copy.deepcopy(training.model.state_dict()))
        writer = adapter.DataStatesStorageWriter(tmp_path / "c")
        saved.append(dcp.async_save(training.model.state_dict(), storage_writer=writer))

    handle = training.optimizer.register_step_pre_hook(save)
    training.optimizer.step()
    handle.remove()
    saved[0].result()
    live = {key: torch.zeros_like(value) for key, value in training.model.state_dict().items()}
    dcp.load(live, checkpoint_id=str(tmp_path / "c"))
    assert all(torch.equal(live[key], value) for key, value in training.expected[0].items())
