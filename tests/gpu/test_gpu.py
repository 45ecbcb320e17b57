"""Capture from GPU memory and restore to it: torch and CuPy, streams, the gate, states larger than the host cache."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hold import held

import datastates as ds
from datastates import _native
from datastates.errors import TornSnapshotError
from datastates.providers import GpuTensorProvider, RngProvider, from_state_dict, from_stateful
from datastates.testing import ProviderTests, equal

SMALL: dict[str, Any] = {"host_cache": "8MiB", "block": "1MiB"}
LONG = 2_000_000_000  # clock cycles: about a second on today's GPUs


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    yield
    _native.clear_faults()


def model_and_optimizer(**options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 1024), torch.nn.BatchNorm1d(1024), torch.nn.Linear(1024, 512)
    ).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, **options)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(16, 512, device="cuda")).square().mean().backward()
    optimizer.step()


def states(*parts: Any) -> list[Any]:
    return [copy.deepcopy(p.state_dict()) for p in parts]


def host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {k: host(v) for k, v in value.items()}
    return [host(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("backend", ["io_uring", "pwrite"])
def test_mixed_state_larger_than_the_cache(backend: str, tmp_path: Path) -> None:
    state = {
        "large": torch.randn(6 << 20, device="cuda"),
        "small": [torch.full((n,), n, device="cuda", dtype=torch.bfloat16) for n in range(200)],
        "host": torch.randn(3 << 20),
        "pinned": torch.randn(1 << 20).pin_memory(),
        "array": np.arange(1 << 20),
        "bool": torch.rand(1000, device="cuda") > 0.5,
        "fp8": torch.randn(1000, device="cuda").to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3, device="cuda"),
        "scalar": torch.tensor(3.5, device="cuda"),
        "transposed": torch.randn(300, 200, device="cuda").t(),
        "column": torch.randn(300, 200, device="cuda")[:, 7],
        "text": "x",
    }
    snapshot = ds.snapshot([from_state_dict("s", state)], tmp_path / "c", io_backend=backend, **SMALL)
    snapshot.wait_committed()
    assert snapshot.report.backend == backend
    assert equal(ds.load(tmp_path / "c")["s"], host(state))
    live = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else copy.deepcopy(v) for k, v in state.items()}
    for tensor in live["small"]:
        tensor.zero_()
    live["array"] = np.zeros_like(state["array"])
    ds.restore([from_state_dict("s", live)], tmp_path / "c", io_backend=backend, **SMALL)
    assert equal(live, state)
    assert live["large"].is_cuda


def test_opens_on_a_machine_without_a_gpu(tmp_path: Path) -> None:
    state = {"w": torch.randn(1000, device="cuda")}
    ds.snapshot([from_state_dict("s", state)], tmp_path / "c").wait_committed()
    opened = torch.load(tmp_path / "c" / "rank-00000.pt", weights_only=True, mmap=True)["s"]["w"]
    assert torch.equal(opened, state["w"].cpu())


def test_cupy_arrays(tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy")
    state = {
        "a": cupy.arange(3_000_000, dtype="f4").reshape(1000, 3000),
        "t": cupy.ones((20, 30)).T,
        "i": cupy.arange(7),
    }
    before = {k: v.copy() for k, v in state.items()}
    with ds.Checkpointer(tmp_path, **SMALL) as checkpointer:
        checkpointer.snapshot([from_state_dict("s", state)], step=1)
        with checkpointer.gate():
            for array in state.values():
                array += 1
    ds.restore([from_state_dict("s", state)], tmp_path, **SMALL)
    assert equal(state, before)
    assert equal(ds.load(tmp_path)["s"], {k: v.get() for k, v in before.items()})


def test_cupy_streams_are_waited_for(tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        array = cupy.zeros(1 << 20, dtype="f4")
        for _ in range(200):
            array += 1
        ds.snapshot([from_state_dict("s", {"a": array})], tmp_path / "c").wait_committed()
    assert (ds.load(tmp_path / "c")["s"]["a"] == 200).all()


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": True}, {"foreach": False}, {"fused": True, "capturable": True}]
)
def test_the_automatic_gate_keeps_snapshots_whole(options: dict[str, Any], tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer(**options)
    train_step(model, optimizer)
    expected = {}
    with ds.Checkpointer(tmp_path, host_cache="4MiB", block="1MiB") as checkpointer:
        for step in range(5):
            checkpointer.snapshot([from_stateful("m", model), from_stateful("o", optimizer)], step=step)
            expected[step] = states(model, optimizer)
            train_step(model, optimizer)
    for step, (m, o) in expected.items():
        loaded = ds.load(tmp_path / f"step-{step:08d}")
        assert equal(dict(loaded["m"]), dict(host(dict(m))))
        assert equal(loaded["o"], host(o))


def test_capture_is_ordered_after_the_work_already_enqueued(tmp_path: Path) -> None:
    weight = torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(LONG)
    weight.add_(1)
    ds.snapshot([from_state_dict("s", {"w": weight})], tmp_path / "c").wait_committed()
    assert (ds.load(tmp_path / "c")["s"]["w"] == 1).all()


def test_capture_follows_the_current_stream(tmp_path: Path) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        weight = torch.zeros(1 << 20, device="cuda")
        torch.cuda._sleep(LONG)
        weight.add_(1)
        ds.snapshot([from_state_dict("s", {"w": weight})], tmp_path / "c").wait_committed()
    assert (ds.load(tmp_path / "c")["s"]["w"] == 1).all()


def test_the_gate_lets_the_stream_wait_and_not_the_cpu(tmp_path: Path) -> None:
    weight = torch.zeros(1 << 20, device="cuda")
    with ds.Checkpointer(tmp_path) as checkpointer:
        checkpointer.snapshot([from_state_dict("s", {"w": weight})], step=0).wait_committed()  # pins the cache once
        torch.cuda._sleep(LONG)
        slept = torch.cuda.Event()
        slept.record()
        snapshot = checkpointer.snapshot([from_state_dict("s", {"w": weight})], step=1)
        checkpointer.gate()
        weight.add_(1)
        assert not slept.query()  # all of this was enqueued while the GPU was still asleep
        assert not snapshot.captured
        snapshot.wait_committed()
    assert (ds.load(tmp_path)["s"]["w"] == 0).all()
    assert (weight == 1).all()


def test_what_is_not_lazy_is_copied_in_stream_order(tmp_path: Path) -> None:
    model, _ = model_and_optimizer()
    buffers = dict(model.named_buffers())
    with ds.Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            before = {k: v.clone() for k, v in buffers.items()}
            snapshot = checkpointer.snapshot([from_stateful("m", model)], step=step)
            model(torch.randn(16, 512, device="cuda"))
            snapshot.wait_committed()
            loaded = ds.load(snapshot.path)["m"]
            assert all(torch.equal(loaded[k], v.cpu()) for k, v in before.items())
            assert not torch.equal(loaded["1.running_mean"], buffers["1.running_mean"].cpu())


@pytest.mark.parametrize("update", ["fused", "data", "kernel"])
def test_a_change_before_capture_is_caught_and_named(update: str, tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer(fused=True)
    train_step(model, optimizer)
    with ds.Checkpointer(tmp_path, host_cache="2MiB", block="1MiB", auto_gate=False) as checkpointer:
        with held():
            snapshot = checkpointer.snapshot([from_stateful("m", model), from_stateful("o", optimizer)], step=1)
            if update == "fused":
                train_step(model, optimizer)
            elif update == "data":
                for parameter in model.parameters():
                    parameter.data.mul_(2)
            else:
                for parameter in model.parameters():
                    torch.cuda.synchronize()
                    parameter.data.untyped_storage().fill_(3)
        with pytest.raises(TornSnapshotError, match=r"m/\d\.weight"):
            snapshot.wait_committed()
        checkpointer.snapshot([from_stateful("m", model)], step=2).wait_committed()
        assert checkpointer.steps() == [2]


def test_the_gate_prevents_it(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer(fused=True)
    train_step(model, optimizer)
    with ds.Checkpointer(tmp_path, host_cache="2MiB", block="1MiB", auto_gate=False) as checkpointer:
        _native.arm_fault("write", "delay", 20)
        snapshot = checkpointer.snapshot([from_stateful("m", model)], step=1)
        before = states(model)[0]
        with checkpointer.gate():
            train_step(model, optimizer)
        snapshot.wait_committed()
    assert equal(dict(ds.load(tmp_path)["m"]), host(dict(before)))


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    def run(steps: int, resume: bool) -> list[Any]:
        model, optimizer = model_and_optimizer(fused=True)
        providers = [from_stateful("m", model), from_stateful("o", optimizer), RngProvider()]
        with ds.Checkpointer(tmp_path / "ck") as checkpointer:
            start = checkpointer.restore(providers).step if resume else 0
            for step in range(start, steps):
                train_step(model, optimizer)
                if step == 3 and not resume:
                    checkpointer.snapshot(providers, step=step + 1)
        return states(model, optimizer)

    whole = run(8, resume=False)
    assert equal(host(run(8, resume=True)), host(whole))


@pytest.mark.alone
def test_memory_is_given_back(tmp_path: Path) -> None:
    weight = torch.randn(1 << 22, device="cuda")
    with ds.Checkpointer(tmp_path, keep_last=1, **SMALL) as checkpointer:
        for step in range(30):
            checkpointer.snapshot([from_state_dict("s", {"w": weight, "c": weight[::8]})], step=step).wait_committed()
            if step == 5:
                torch.cuda.synchronize()
                allocated, (free, _) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= allocated
        assert torch.cuda.mem_get_info()[0] >= free - (2 << 20)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_state_on_two_gpus(tmp_path: Path) -> None:
    state = {f"w{d}": torch.randn(3 << 20, device=f"cuda:{d}") for d in range(2)}
    before = {k: v.clone() for k, v in state.items()}
    with ds.Checkpointer(tmp_path, **SMALL) as checkpointer:
        checkpointer.snapshot([from_state_dict("s", state)], step=0)
        with checkpointer.gate():
            for tensor in state.values():
                tensor.zero_()
        checkpointer.wait()
        checkpointer.restore([from_state_dict("s", state)])
    assert equal(state, before)


class TestGpuTensors(ProviderTests):
    def provider(self) -> ds.StateProvider:
        tensors = {"a": torch.arange(100.0, device="cuda"), "b": torch.ones(3, 3, device="cuda", dtype=torch.bfloat16)}
        provider = GpuTensorProvider("gpu", tensors)
        provider.live = tensors  # type: ignore[attr-defined]
        return provider

    def perturb(self, provider: Any) -> None:
        for tensor in provider.live.values():
            tensor.add_(1)

    def state(self, provider: Any) -> object:
        return {k: v.clone() for k, v in provider.live.items()}


def test_a_gpu_provider_refuses_host_tensors(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="gpu/a is not on a GPU"):
        ds.snapshot([GpuTensorProvider("gpu", {"a": torch.ones(1)})], tmp_path / "c")


def test_the_demo_resumes_on_the_gpu(tmp_path: Path) -> None:
    demo = [sys.executable, "-m", "datastates.demo"]
    done = subprocess.run(demo, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "equal to the last bit" in done.stdout
    print(done.stdout)
