"""Hashes that a kernel takes of GPU memory are those of the same bytes in host memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from datastates import _native
from datastates._base.sizes import CHUNK
from datastates.config import IoSettings
from datastates.errors import DeviceError
from datastates.executor.executor import Executor


@pytest.fixture(scope="module")
def executor() -> Executor:
    return Executor(IoSettings(), 64 << 20)


def _submit(executor: Executor, tensors: list[torch.Tensor]) -> _native.HashJob:
    on_gpu = [t.is_cuda for t in tensors]
    stream = torch.cuda.current_stream().cuda_stream
    columns = (
        np.array([t.data_ptr() for t in tensors], np.uint64),
        np.where(on_gpu, 0, -1).astype(np.int32),
        np.where(on_gpu, stream, 0).astype(np.uint64),
    )
    return executor.submit_hash(columns, np.array([t.nbytes for t in tensors], np.uint64))


def _expected(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(_native.hash_chunks(t.cpu().numpy()) for t in tensors)


@pytest.mark.parametrize("beside", [False, True], ids=["GPU", "GPU and host"])
def test_any_length_at_any_address(executor: Executor, beside: bool) -> None:
    rng = np.random.default_rng(0)
    data = torch.from_numpy(rng.integers(256, size=8 * CHUNK, dtype=np.uint8)).cuda()
    tensors = []
    for i in range(3000):
        nbytes = int(rng.integers((1, 70, 2100, 60_000, CHUNK + 2, 4 * CHUNK)[i % 6]))
        nbytes = nbytes // 512 * 512 if i % 7 == 0 else nbytes
        begin = int(rng.integers(len(data) - nbytes)) & -(1, 1, 2, 4, 8, 16, 256)[int(rng.integers(7))]
        tensors.append(data[begin : begin + nbytes])
        if beside and i % 3 == 0:
            tensors.append(tensors[-1].cpu())
    job = _submit(executor, tensors)
    assert job.wait(120)
    assert job.hashes.tobytes() == _expected(tensors)


def test_every_flipped_bit_of_a_chunk_is_seen(executor: Executor) -> None:
    data = torch.randint(256, (512, 700), dtype=torch.uint8, device="cuda")
    data[:] = data[0]
    flipped = torch.arange(512, device="cuda")
    data[flipped, flipped + 100] ^= 1 << (flipped % 8).to(torch.uint8)
    job = _submit(executor, list(data))
    assert job.wait(60)
    assert len(np.unique(job.hashes, axis=0)) == 512
    assert job.hashes.tobytes() == _expected(list(data))


def test_a_kernel_follows_the_work_on_its_sources_streams(executor: Executor) -> None:
    data = torch.zeros(20 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(400_000_000)
        data += 7
        job = _submit(executor, [data])
    assert job.wait(60)
    assert job.hashes.tobytes() == _expected([torch.full((20 << 20,), 7, dtype=torch.uint8)])


def test_a_stream_that_is_captured_is_refused(executor: Executor) -> None:
    data = torch.zeros(5, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data += 1
        with pytest.raises(DeviceError, match="captured"):
            _submit(executor, [data])


def test_memory_that_is_gone_is_told_and_the_rest_is_hashed(executor: Executor) -> None:
    data = torch.arange(1 << 20, device="cuda", dtype=torch.int32)
    address = np.array([1 << 12, data.data_ptr(), 1 << 40], np.uint64)
    nbytes = np.array([1 << 20, data.nbytes, 5], np.uint64)
    job = executor.submit_hash((address, np.zeros(3, np.int32), np.zeros(3, np.uint64)), nbytes)
    assert job.wait(60)
    assert job.lost == [0, 2]
    assert job.hashes[4:-1].tobytes() == _expected([data])
    job = executor.submit_hash((address[:1], np.zeros(1, np.int32), np.zeros(1, np.uint64)), nbytes[:1])
    assert job.wait(60)
    assert job.lost == [0]
