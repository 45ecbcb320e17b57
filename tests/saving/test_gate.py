"""The gate: state is captured before an optimizer changes it, and a write that passes no gate is caught and named."""

from __future__ import annotations

import copy
import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hold import GATE, held

import datastates as ds
from datastates import _native
from datastates.errors import DatastatesError, TornSnapshotError
from datastates.providers import HostTensorProvider, from_state_dict, from_stateful

torch = pytest.importorskip("torch")

OPTIONS: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB", "io_threads": 1}
"""A cache smaller than any state saved with it, so that capture cannot end before the first write has."""

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW plain": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False, fused=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD plain": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False, fused=False),
}


@pytest.fixture
def options() -> dict[str, Any]:
    """Settings of a checkpointer."""
    return dict(OPTIONS)


@pytest.fixture(params=["io_uring", "pwrite"])
def each_backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings with each backend that this system allows."""
    if request.param == "io_uring":
        try:
            _native.Executor(
                cache_bytes=2 << 20,
                block_bytes=1 << 20,
                queue_depth=2,
                backend="io_uring",
                direct=False,
                io_threads=1,
            )
        except DatastatesError as error:
            pytest.skip(f"io_uring is not allowed here: {error}")
    return {**OPTIONS, "io_backend": request.param}


class Training:
    """A model of 4 MiB and its optimizer, after two steps, with gradients for the next."""

    def __init__(self, make: Callable[[Any], Any], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512))
        self.optimizer = make(self.model.parameters())
        for _ in range(2):
            self.backward()
            self.optimizer.step()
        self.backward()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 512)).square().sum().backward()

    def providers(self, prefix: str = "") -> list[ds.StateProvider]:
        return [
            from_stateful(prefix + "model", self.model),
            from_stateful(prefix + "optimizer", self.optimizer),
        ]

    def state(self, prefix: str = "") -> dict[str, Any]:
        return copy.deepcopy(
            {
                prefix + "model": dict(self.model.state_dict()),
                prefix + "optimizer": self.optimizer.state_dict(),
            }
        )


def differences(found: Any, expected: Any, at: str = "") -> list[str]:
    if isinstance(expected, torch.Tensor):
        return [] if isinstance(found, torch.Tensor) and torch.equal(found, expected) else [at]
    if isinstance(expected, dict):
        if set(found) != set(expected):
            return [at]
        return [d for k in expected for d in differences(found[k], expected[k], f"{at}/{k}")]
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return [at]
        return [d for i, e in enumerate(expected) for d in differences(found[i], e, f"{at}/{i}")]
    return [] if found == expected else [at]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_gate_is_on_by_itself_and_no_optimizer_tears_a_snapshot(
    optimizer: str, each_backend: dict[str, Any], tmp_path: Path
) -> None:
    training = Training(OPTIMIZERS[optimizer])
    with ds.Checkpointer(tmp_path, **each_backend) as ckpt:
        before = training.state()
        with held(until=GATE):
            snapshot = ckpt.snapshot(training.providers(), step=1)
            assert not snapshot.captured
            training.optimizer.step()
        snapshot.wait_committed()
        assert snapshot.report.gate_seconds > 0
    assert differences(training.state(), before) != []
    assert differences(ds.load(tmp_path), before) == []


@pytest.mark.parametrize("how", ["positional", "keyword"])
@pytest.mark.parametrize("make", [*OPTIMIZERS.values(), lambda p: torch.optim.LBFGS(p, max_iter=3)])
def test_forward_and_backward_in_a_closure_do_not_wait_and_the_update_does(
    make: Callable[[Any], Any], how: str, options: dict[str, Any], tmp_path: Path
) -> None:
    training = Training(make) if make in OPTIMIZERS.values() else Training(OPTIMIZERS["SGD plain"])
    optimizer = training.optimizer if make in OPTIMIZERS.values() else make(training.model.parameters())
    waited: list[bool] = []
    with ds.Checkpointer(tmp_path, **options) as ckpt:
        before = training.state()

        def closure() -> Any:
            waited.append(snapshot.captured or snapshot.report.gate_seconds > 0)
            training.backward()
            return sum(p.grad.square().sum() for p in training.model.parameters())

        given: Any = {"positional": ((closure,), {}), "keyword": ((), {"closure": closure})}[how]
        with held(until=GATE):
            snapshot = ckpt.snapshot(training.providers(), step=1)
            loss = optimizer.step(*given[0], **given[1])
        assert float(loss) > 0
        snapshot.wait_committed()
    assert waited[0] is False
    assert all(waited[1:])
    assert differences(ds.load(tmp_path), before) == []
    assert differences(training.state(), before) != []


def test_an_optimizer_of_ones_own_waits_before_it_calls_a_closure(options: dict[str, Any], tmp_path: Path) -> None:
    class Own(torch.optim.SGD):  # type: ignore[misc, name-defined]
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.add_(1)  # as optimizers that look ahead do
            return super().step(closure)

    training = Training(lambda p: Own(p, lr=0.1))
    with ds.Checkpointer(tmp_path, **options) as ckpt:
        before = training.state()
        with held(until=GATE):
            ckpt.snapshot(training.providers(), step=1)
            training.optimizer.step(lambda: torch.zeros(()))
    assert differences(ds.load(tmp_path), before) == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_the_gate_an_optimizer_step_fails_the_snapshot_by_key(
    optimizer: str, options: dict[str, Any], tmp_path: Path
) -> None:
    training = Training(OPTIMIZERS[optimizer])
    with ds.Checkpointer(tmp_path, auto_gate=False, **options) as ckpt:
        with held():
            snapshot = ckpt.snapshot(training.providers(), step=1)
            training.optimizer.step()
        with pytest.raises(TornSnapshotError) as caught:
            snapshot.wait_committed()
        assert ckpt.steps() == []
        after = training.state()
        ckpt.snapshot(training.providers(), step=2).wait_committed()
    assert caught.value.keys
    keys = {"model/0.weight", "model/0.bias", "model/1.weight", "model/1.bias"}
    assert all(key in keys or key.startswith("optimizer/state/") for key in caught.value.keys)
    assert repr(caught.value.keys[0]) in str(caught.value)
    assert differences(ds.load(tmp_path), after) == []
    assert [e.name for e in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("as_block", [False, True], ids=["call", "with"])
@pytest.mark.parametrize("optimizer", ["AdamW foreach", "AdamW fused"])
def test_the_gate_by_hand_prevents_it(optimizer: str, as_block: bool, options: dict[str, Any], tmp_path: Path) -> None:
    training = Training(OPTIMIZERS[optimizer])
    with ds.Checkpointer(tmp_path, auto_gate=False, **options) as ckpt:
        before = training.state()
        with held(until=GATE):
            snapshot = ckpt.snapshot(training.providers(), step=1)
            if as_block:
                with ckpt.gate():
                    training.optimizer.step()
            else:
                ckpt.gate()
                training.optimizer.step()
        snapshot.wait_committed()
    assert differences(ds.load(tmp_path), before) == []


def tensors() -> dict[str, Any]:
    return {"a": torch.ones(300_000), "b.c": torch.ones(600_000), "d": torch.ones(600_000)}


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda t: t.add_(1),
    ".data": lambda t: t.data.add_(1),
    ".data by index": lambda t: t.data.__setitem__(slice(None), 5),
    ".data, one element": lambda t: t.data.__setitem__(100_001, 5),
    "numpy": lambda t: t.numpy().fill(5),
    "inference mode": lambda t: torch.inference_mode()(t.add_)(1),
    "detached": lambda t: t.detach().mul_(3),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_passes_no_gate_fails_the_snapshot_by_its_key_alone(
    write: str, options: dict[str, Any], tmp_path: Path
) -> None:
    state = tensors()
    with ds.Checkpointer(tmp_path, **options) as ckpt:
        with held():
            snapshot = ckpt.snapshot([from_state_dict("x", state)], step=1)
            WRITES[write](state["d"])
        with pytest.raises(TornSnapshotError, match="'x/d'") as caught:
            snapshot.wait_committed()
    assert caught.value.keys == ["x/d"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", ["in place", "numpy"])
def test_the_gate_guards_any_write(write: str, options: dict[str, Any], tmp_path: Path) -> None:
    state = tensors()
    with ds.Checkpointer(tmp_path, **options) as ckpt:
        with held(until=GATE):
            snapshot = ckpt.snapshot([from_state_dict("x", state)], step=1)
            ckpt.gate()
            WRITES[write](state["d"])
        snapshot.wait_committed()
    assert differences(ds.load(tmp_path)["x"], tensors()) == []


def test_a_write_into_a_numpy_array_declared_lazy_is_caught(options: dict[str, Any], tmp_path: Path) -> None:
    array = torch.ones(1_000_000).numpy()
    with ds.Checkpointer(tmp_path, **options) as ckpt:
        with held():
            snapshot = ckpt.snapshot([HostTensorProvider("x", {"a": array}, lazy=True)], step=1)
            array[:] = 2
        with pytest.raises(TornSnapshotError, match="'x/a'"):
            snapshot.wait_committed()


def test_inference_tensors_are_witnessed_too(options: dict[str, Any], tmp_path: Path) -> None:
    with torch.inference_mode():
        state = tensors()
    with ds.Checkpointer(tmp_path, **options) as ckpt:
        with held():
            snapshot = ckpt.snapshot([from_state_dict("x", state)], step=1)
            with torch.inference_mode():
                state["d"].add_(1)
        with pytest.raises(TornSnapshotError, match="'x/d'"):
            snapshot.wait_committed()


@pytest.mark.parametrize("first", [0, 1])
def test_two_optimizers_in_one_process_both_wait(first: int, options: dict[str, Any], tmp_path: Path) -> None:
    one = Training(OPTIMIZERS["AdamW fused"], seed=1)
    two = Training(OPTIMIZERS["SGD foreach"], seed=2)
    both = [one, two]
    with ds.Checkpointer(tmp_path, **options) as ckpt:
        before = {**one.state("one "), **two.state("two ")}
        with held(until=GATE):
            snapshot = ckpt.snapshot([*one.providers("one "), *two.providers("two ")], step=1)
            both[first].optimizer.step()
            both[1 - first].optimizer.step()
        snapshot.wait_committed()
    assert differences(ds.load(tmp_path), before) == []


def test_one_step_waits_for_two_snapshots_in_flight(options: dict[str, Any], tmp_path: Path) -> None:
    training = Training(OPTIMIZERS["AdamW foreach"])
    with ds.Checkpointer(tmp_path, **options) as ckpt:
        before = training.state()
        with held("capture", until=GATE):
            both = [ckpt.snapshot(training.providers(), step=step) for step in (1, 2)]
            assert not any(snapshot.captured for snapshot in both)
            training.optimizer.step()
        ckpt.wait()
        paths = [ckpt.directory / f"step-0000000{step}" for step in (1, 2)]
    for path in paths:
        assert differences(ds.load(path), before) == []


def test_a_single_snapshot_is_gated_too(options: dict[str, Any], tmp_path: Path) -> None:
    training = Training(OPTIMIZERS["AdamW fused"])
    before = training.state()
    with held(until=GATE):
        snapshot = ds.snapshot(training.providers(), tmp_path / "one", **options)
        training.optimizer.step()
    snapshot.wait_committed()
    assert differences(ds.load(tmp_path / "one"), before) == []


def test_many_steps_with_a_snapshot_each_are_never_torn(options: dict[str, Any], tmp_path: Path) -> None:
    training = Training(OPTIMIZERS["AdamW fused"])
    states = {}
    with ds.Checkpointer(tmp_path, **options) as ckpt:
        for step in range(8):
            states[step] = training.state()
            ckpt.snapshot(training.providers(), step=step)
            training.optimizer.step()
            training.backward()
    for step, state in states.items():
        assert differences(ds.load(tmp_path / f"step-0000000{step}"), state) == []


@pytest.mark.parametrize("auto", [False, True])
def test_what_the_forward_pass_changes_is_copied_at_the_snapshot(
    auto: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.BatchNorm1d(1024), torch.nn.Linear(1024, 64))
    model(torch.randn(8, 1024))
    with ds.Checkpointer(tmp_path, auto_gate=auto, **options) as ckpt:
        before = copy.deepcopy(dict(model.state_dict()))
        with held():
            snapshot = ckpt.snapshot([from_stateful("model", model)], step=1)
            model(torch.randn(8, 1024) * 10 + 5)
            assert not snapshot.captured
        snapshot.wait_committed()
    assert set(differences(dict(model.state_dict()), before)) == {
        "/1.running_mean",
        "/1.running_var",
        "/1.num_batches_tracked",
    }
    assert differences(ds.load(tmp_path)["model"], before) == []


def test_a_failing_snapshot_lets_the_optimizer_go_on(options: dict[str, Any], tmp_path: Path) -> None:
    training = Training(OPTIMIZERS["AdamW foreach"])
    with ds.Checkpointer(tmp_path, on_error="warn", **options) as ckpt:
        _native.arm_fault("write", "fail", errno.EIO)
        snapshot = ckpt.snapshot(training.providers(), step=1)
        training.optimizer.step()
        with pytest.raises(DatastatesError, match="Input/output error"):
            snapshot.wait_committed()
        _native.clear_faults()
        training.backward()
        training.optimizer.step()
        before = training.state()
        ckpt.snapshot(training.providers(), step=2)
        training.optimizer.step()
    assert differences(ds.load(tmp_path), before) == []


def test_state_is_captured_while_the_storage_makes_the_file(tmp_path: Path) -> None:
    training = Training(OPTIMIZERS["AdamW foreach"])
    with ds.Checkpointer(tmp_path, host_cache="64MiB") as ckpt:
        before = training.state()
        with held("open"):
            snapshot = ckpt.snapshot(training.providers(), step=1)
            training.optimizer.step()
            snapshot.wait_captured()
            assert list(tmp_path.rglob("*.pt")) == []
        snapshot.wait_committed()
        assert differences(ds.load(tmp_path), before) == []
        _native.arm_fault("open", "delay", 20, 1, 1)
        later = ckpt.snapshot(training.providers(), step=2)
        later.wait_committed()
    assert later.report.stages["create"].seconds >= 0.02


def test_the_gate_waits_for_capture_and_not_for_storage(options: dict[str, Any], tmp_path: Path) -> None:
    training = Training(OPTIMIZERS["AdamW foreach"])
    with ds.Checkpointer(tmp_path, **options) as ckpt, held("sync"):
        snapshot = ckpt.snapshot(training.providers(), step=1)
        training.optimizer.step()
        ckpt.gate()
        assert not snapshot.persisted


def test_a_gradient_change_is_no_tear(options: dict[str, Any], tmp_path: Path) -> None:
    training = Training(OPTIMIZERS["AdamW foreach"])
    with ds.Checkpointer(tmp_path, auto_gate=False, **options) as ckpt:
        before = training.state()
        with held():
            snapshot = ckpt.snapshot(training.providers(), step=1)
            training.backward()
        snapshot.wait_committed()
    assert differences(ds.load(tmp_path), before) == []


def test_what_a_scheduler_changes_is_not_lazy(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.5))
    with ds.Checkpointer(tmp_path) as checkpointer:
        snapshot = checkpointer.snapshot([from_stateful("o", optimizer)], step=0)
        optimizer.param_groups[0]["lr"].mul_(0.5)
        snapshot.wait_committed()
    assert ds.load(tmp_path)["o"]["param_groups"][0]["lr"] == 0.5


def test_extra_state_is_not_lazy(tmp_path: Path) -> None:
    class Counting(torch.nn.Linear):
        total = torch.zeros(3)

        def get_extra_state(self) -> dict[str, torch.Tensor]:
            return {"total": self.total}

        def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
            self.total = state["total"]

    module = Counting(2, 2)
    with ds.Checkpointer(tmp_path) as checkpointer:
        snapshot = checkpointer.snapshot([from_stateful("m", module)], step=0)
        module.total.add_(1)
        snapshot.wait_committed()
    assert ds.load(tmp_path)["m"]["_extra_state"]["total"].sum() == 0


MOVED = """
import gc, sys
import torch
import datastates as ds
from datastates import _native
from datastates.errors import TornSnapshotError
from datastates.providers import from_stateful

layer = torch.nn.Linear(4096, 4096)
provider = from_stateful("layer", layer)
with ds.Checkpointer(sys.argv[1], host_cache="2MiB", block="1MiB", on_error="warn") as ckpt:
    for _ in range(int(sys.argv[2])):
        ckpt.snapshot([provider], step=0).wait_committed()
    _native.arm_fault("write", "delay", 60_000)
    snapshot = ckpt.snapshot([provider], step=1)
    layer.weight.data = torch.empty(0)  # as moving a model to another device does: 64 MiB go back to the system
    gc.collect()
    assert not snapshot.captured
    _native.clear_faults()
    try:
        snapshot.wait_committed(60)
    except TornSnapshotError as error:
        assert "layer/weight" in str(error), error
    else:
        raise AssertionError("a parameter that was given other memory was taken for what it had been")
"""


@pytest.mark.by_hand
@pytest.mark.parametrize("before", [0, pytest.param(1, marks=pytest.mark.long)], ids=["first", "again"])
def test_memory_is_kept_until_captured_whatever_a_tensor_is_given_instead(before: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", MOVED, str(tmp_path), str(before)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.returncode, done.stderr)
