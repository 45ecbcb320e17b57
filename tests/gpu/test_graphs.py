"""CUDA graphs and compiled steps beside pending snapshots, and device memory that is freed before its capture."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates as ds
from datastates import _native
from datastates.errors import DatastatesError, DeviceError, TornSnapshotError
from datastates.providers import GpuTensorProvider, from_stateful
from datastates.testing import equal

pytestmark = pytest.mark.filterwarnings("default")
OPTIONS: dict[str, Any] = {"host_cache": "16MiB", "block": "1MiB"}


@pytest.fixture(autouse=True)
def _disarmed() -> Any:
    yield
    _native.clear_faults()


class Training:
    """A model of 64 MiB, with an optimizer that CUDA graphs can capture."""

    def __init__(self) -> None:
        gc.collect()  # graphs of earlier tests: one that is freed during a capture makes it fail
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4))).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, capturable=True)
        self.input = torch.randn(8, 2048, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(side)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.input).square().mean().backward()
        self.optimizer.step()

    def providers(self) -> list[Any]:
        return [from_stateful("m", self.model), from_stateful("o", self.optimizer)]

    def weights(self) -> dict[str, torch.Tensor]:
        return {k: v.cpu().clone() for k, v in self.model.state_dict().items()}


def _saved(path: Path) -> dict[str, torch.Tensor]:
    return {k: v.cpu() for k, v in ds.load(path)["m"].items()}


def _hold_up(milliseconds: int = 500) -> None:
    _native.arm_fault("write", "delay", milliseconds, 1, 1)


@pytest.mark.parametrize("device_cache", ["0", "1GiB"])
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_graph_is_captured_while_a_snapshot_is_pending(mode: str, device_cache: str, tmp_path: Path) -> None:
    training = Training()
    with ds.Checkpointer(tmp_path, device_cache=device_cache, **OPTIONS) as ckpt:
        for step in range(2):
            expected = training.weights()
            _hold_up()
            snapshot = ckpt.snapshot(training.providers(), step=step)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode=mode):
                training.step()
            graph.replay()
            torch.cuda.synchronize()
            snapshot.wait_committed()
            assert equal(_saved(tmp_path), expected)
            assert not equal(training.weights(), expected)


@pytest.mark.parametrize("gated", [True, False])
def test_a_replay_updates_behind_the_gate_or_is_caught(gated: bool, tmp_path: Path) -> None:
    training = Training()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.step()
    with ds.Checkpointer(tmp_path, on_error="warn", **OPTIONS) as ckpt:
        expected = training.weights()
        _hold_up()
        snapshot = ckpt.snapshot(training.providers(), step=1)
        if gated:
            ckpt.gate()
        graph.replay()
        if gated:
            snapshot.wait_committed()
            assert equal(_saved(tmp_path), expected)
        else:
            with pytest.raises(TornSnapshotError):
                snapshot.wait_committed()


def test_graphed_callables_beside_a_snapshot(tmp_path: Path) -> None:
    training = Training()
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        expected = training.weights()
        _hold_up()
        snapshot = ckpt.snapshot(training.providers(), step=1)
        training.model = torch.cuda.make_graphed_callables(training.model, (training.input,))
        training.step()
        snapshot.wait_committed()
    assert equal(_saved(tmp_path), expected)


def test_a_snapshot_within_a_capture_fails_by_itself_and_the_graph_is_whole(tmp_path: Path) -> None:
    training = Training()
    with ds.Checkpointer(tmp_path, on_error="warn", **OPTIONS) as ckpt:
        ckpt.snapshot([from_stateful("m", training.model)], step=0).wait_committed()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            snapshot = ckpt.snapshot([from_stateful("m", training.model)], step=1)
            training.step()
        with pytest.raises(DeviceError, match="being captured"):
            snapshot.wait_committed()
        before = training.weights()
        graph.replay()
        torch.cuda.synchronize()
        assert not equal(training.weights(), before)


@pytest.mark.parametrize("test", ["captured_while", "replay", "freed"])
def test_the_same_with_segments_that_grow(test: str) -> None:
    if "DATASTATES_TEST_SEGMENTS" in os.environ:
        pytest.skip("this is the process with such segments")
    segments = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "DATASTATES_TEST_SEGMENTS": "1"}
    command = [str(Path(sys.executable).parent / "pytest"), __file__, "-q", "-k", test, "-p", "no:cacheprovider"]
    done = subprocess.run(command, env={**os.environ, **segments}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("whole", [False, True])
def test_compiled_steps_pass_the_gate(whole: bool, tmp_path: Path) -> None:
    training = Training()
    step = torch.compile(training.step if whole else training.optimizer.step)
    step()
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        for number in range(3):
            expected = training.weights()
            _hold_up()
            snapshot = ckpt.snapshot(training.providers(), step=number)
            step()
            snapshot.wait_committed()
            assert equal(_saved(tmp_path), expected)
            assert not equal(training.weights(), expected)


def test_state_of_a_side_stream(tmp_path: Path) -> None:
    side, tensors = torch.cuda.Stream(), {"a": torch.zeros(16 << 20, device="cuda")}
    side.wait_stream(torch.cuda.current_stream())
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt, torch.cuda.stream(side):
        for _ in range(50):
            tensors["a"].add_(1)
        snapshot = ckpt.snapshot([GpuTensorProvider("m", tensors)], step=1)
        with ckpt.gate():
            tensors["a"].zero_()
        snapshot.wait_committed()
    assert (ds.load(tmp_path)["m"]["a"] == 50).all()


@pytest.mark.parametrize("device_cache", ["0", "1GiB"])
@pytest.mark.parametrize("how", ["freed", "given back", "larger", "shared"])
@pytest.mark.parametrize("elements", [16 << 20, 1000], ids=["large", "small"])
def test_device_memory_freed_before_it_is_captured_fails_that_snapshot(
    elements: int, how: str, device_cache: str, tmp_path: Path
) -> None:
    tensors = {str(i): torch.full((16 << 20,), float(i), device="cuda") for i in range(4)}
    tensors |= {f"z{i}": torch.full((elements,), float(i), device="cuda") for i in range(4)}
    with ds.Checkpointer(tmp_path, device_cache=device_cache, on_error="warn", **OPTIONS) as ckpt:
        _hold_up()
        snapshot = ckpt.snapshot([GpuTensorProvider("m", tensors)], step=1)
        for i in range(4):
            if how == "larger":
                tensors[f"z{i}"].resize_(32 << 20)
            elif how == "shared":
                tensors[f"z{i}"].data = tensors[f"z{i}"].cpu()
            else:
                tensors[f"z{i}"].untyped_storage().resize_(0)
        if how == "given back":
            torch.cuda.empty_cache()
        ckpt.gate()
        with pytest.raises(DatastatesError):
            snapshot.wait_committed()
        good = {"good": torch.arange(1 << 20, device="cuda")}  # the CUDA context still works
        ckpt.snapshot([GpuTensorProvider("m", good)], step=2).wait_committed()
    assert torch.equal(ds.load(tmp_path)["m"]["good"].cpu(), good["good"].cpu())


@pytest.mark.alone
def test_nearly_no_device_memory_left_with_the_device_cache_on(tmp_path: Path) -> None:
    training = Training()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - (256 << 20), dtype=torch.uint8, device="cuda")
    with ds.Checkpointer(tmp_path, device_cache="8GiB", **OPTIONS) as ckpt:
        expected = training.weights()
        snapshot = ckpt.snapshot(training.providers(), step=1)
        training.step()
        snapshot.wait_committed()
    del taken
    torch.cuda.empty_cache()
    assert equal(_saved(tmp_path), expected)


def test_two_devices_in_one_process(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    tensors = {str(i): torch.full((8 << 20,), float(i), device=f"cuda:{i % 2}") for i in range(6)}
    expected = copy.deepcopy({k: v.cpu() for k, v in tensors.items()})
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        snapshot = ckpt.snapshot([GpuTensorProvider("m", tensors)], step=1)
        with ckpt.gate():
            for tensor in tensors.values():
                tensor.zero_()
        snapshot.wait_committed()
        ckpt.restore([GpuTensorProvider("m", tensors)])
    assert equal({k: v.cpu() for k, v in tensors.items()}, expected)
