"""The way of captured bytes: many small tensors, the device cache, page-locked memory, and the trace."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hold import GATE, held

import datastates as ds
from datastates.errors import TornSnapshotError
from datastates.providers import GpuTensorProvider, from_stateful
from datastates.testing import equal


def test_thousands_of_small_tensors(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    sizes = random.integers(0, 5000, 3000)
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)
    tensors = {str(i): torch.randint(0, 100, (int(n),), device="cuda").to(dtypes[i % 4]) for i, n in enumerate(sizes)}
    backing = torch.arange(100_000, dtype=torch.uint8, device="cuda")
    tensors |= {f"odd{i}": backing[1 + 777 * i : 1 + 777 * i + 301] for i in range(100)}  # at odd addresses
    expected = {k: v.cpu().clone() for k, v in tensors.items()}
    with ds.Checkpointer(tmp_path) as checkpointer:
        checkpointer.snapshot([GpuTensorProvider("m", tensors)], step=1).wait_committed()
        for tensor in tensors.values():
            tensor.zero_()
        checkpointer.restore([GpuTensorProvider("m", tensors)])
    assert equal({k: v.cpu() for k, v in tensors.items()}, expected)
    assert equal(ds.load(tmp_path)["m"], expected)


@pytest.mark.parametrize("device_cache", ["0", "1GiB"])
def test_a_sparse_write_past_the_version_counter_is_noticed(device_cache: str, tmp_path: Path) -> None:
    table = torch.nn.Embedding(1_500_000, 16, device="cuda")
    provider = from_stateful("m", table)
    random = np.random.default_rng(1)
    with ds.Checkpointer(tmp_path, host_cache="16MiB", block="1MiB", device_cache=device_cache) as checkpointer:
        checkpointer.snapshot([provider], step=0).wait_committed()
        for step in range(1, 6):
            with held("capture", until=GATE):
                snapshot = checkpointer.snapshot([provider], step=step)
                table.weight.data[int(random.integers(1_500_000)), int(random.integers(16))] += 1.0
                checkpointer.gate()
            with pytest.raises(TornSnapshotError, match="m/weight"):
                snapshot.wait_committed()
        for step in range(6, 11):  # nothing holds the capture up: it may have ended before the write
            expected = table.weight.detach().cpu().clone()
            snapshot = checkpointer.snapshot([provider], step=step)
            table.weight.data[:: 1 + int(random.integers(100_000))] += 1.0
            checkpointer.gate()
            with contextlib.suppress(TornSnapshotError):
                snapshot.wait_committed()
                assert equal(ds.load(tmp_path, step=step)["m"]["weight"], expected)


def _trained(**options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    _step(model, optimizer)
    return model, optimizer


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 2048, device="cuda")).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("device_cache", ["1GiB", "100MiB"])
def test_the_device_cache_keeps_snapshots_whole(device_cache: str, tmp_path: Path) -> None:
    model, optimizer = _trained(fused=True)
    providers = [from_stateful("m", model), from_stateful("o", optimizer)]
    expected = {}
    options = {"host_cache": "16MiB", "block": "1MiB", "device_cache": device_cache}
    with ds.Checkpointer(tmp_path, **options) as checkpointer:
        for step in range(4):
            snapshot = checkpointer.snapshot(providers, step=step)
            expected[step] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            _step(model, optimizer)
            used = snapshot.report.executor["device_cache_bytes"]
            assert used <= (1 << 30 if device_cache == "1GiB" else 100 << 20)
            if step % 2:
                snapshot.wait_committed()  # then the next one finds the device cache empty
            else:
                assert used > 0
    for step, (m, o) in expected.items():
        other, other_optimizer = _trained()
        ds.restore([from_stateful("m", other), from_stateful("o", other_optimizer)], tmp_path / f"step-{step:08d}")
        assert equal(dict(other.state_dict()), dict(m))
        assert equal(other_optimizer.state_dict()["state"], o["state"])


def test_the_device_cache_keeps_odd_tensors_whole(tmp_path: Path) -> None:
    """They fill several slabs, at every alignment, small beside large; kernels that write them may still be running."""
    random = np.random.default_rng(1)
    sizes = [*random.integers(0, 300, 1000), *random.integers(0, 8_000_000, 30), 1, 16, 40_000_001]
    random.shuffle(sizes)
    gaps = random.integers(0, 33, len(sizes))
    begins = np.cumsum(gaps) + np.concatenate([[0], np.cumsum(sizes)[:-1]])
    backing = torch.zeros(int(begins[-1] + sizes[-1]), dtype=torch.uint8, device="cuda")
    tensors = {str(i): backing[int(b) : int(b + n)] for i, (b, n) in enumerate(zip(begins, sizes, strict=True))}
    busy = torch.randn(4096, 4096, device="cuda")
    expected = []
    with ds.Checkpointer(tmp_path, host_cache="16MiB", block="1MiB", device_cache="1GiB") as checkpointer:
        for step in range(3):
            for _ in range(20):
                busy = torch.tanh(busy @ busy)
            backing.random_(0, 256)
            expected.append(backing.clone())
            snapshot = checkpointer.snapshot([GpuTensorProvider("m", tensors)], step=step)
            with checkpointer.gate():
                backing.zero_()
            assert snapshot.report.executor["device_cache_bytes"] > 64 << 20
    for step, whole in enumerate(expected):
        found = ds.load(tmp_path / f"step-{step:08d}")["m"]
        host = whole.cpu()
        assert equal(found, {k: host[int(begins[int(k)]) :][: t.numel()] for k, t in tensors.items()})


@pytest.mark.alone
def test_without_spare_memory_the_device_cache_takes_none(tmp_path: Path) -> None:
    model, optimizer = _trained(fused=True)
    expected = copy.deepcopy(model.state_dict())
    free, total = torch.cuda.mem_get_info()
    taken = torch.empty(free - max(1 << 30, total // 20), dtype=torch.uint8, device="cuda")
    with ds.Checkpointer(tmp_path, host_cache="16MiB", block="1MiB", device_cache="8GiB") as checkpointer:
        snapshot = checkpointer.snapshot([from_stateful("m", model), from_stateful("o", optimizer)], step=0)
        _step(model, optimizer)
        assert snapshot.report.executor["device_cache_bytes"] == 0
    del taken
    torch.cuda.empty_cache()
    assert equal(dict(ds.load(tmp_path)["m"]), {k: v.cpu() for k, v in expected.items()})


def test_an_explicit_cache_is_page_locked_beforehand(tmp_path: Path) -> None:
    torch.zeros(1, device="cuda")
    with ds.Checkpointer(tmp_path, host_cache="256MiB") as checkpointer:
        tensors = {"a": torch.ones(40 << 20, device="cuda")}
        snapshot = checkpointer.snapshot([GpuTensorProvider("m", tensors)], step=0)
        snapshot.wait_committed()
    assert snapshot.report.executor["pinned"] is True


def test_the_trace_shows_the_copies(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(10 << 20, device="cuda"), "b": torch.ones(100, device="cuda")}
    snapshot = ds.snapshot([GpuTensorProvider("m", tensors)], tmp_path / "c")
    snapshot.wait_committed()
    snapshot.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert f"copies from GPU {torch.cuda.current_device()}" in [e["args"].get("name") for e in events if e["ph"] == "M"]
    stages = snapshot.report.stages
    assert stages["capture"].nbytes >= 40 << 20
    assert stages["checksum"].nbytes == (40 << 20) + 400
