"""Exports to one file for ``torch.load``."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import datastates as ds
from datastates._base.sizes import PAGE
from datastates.cli import commands
from datastates.container.digests import constants
from datastates.container.named_tensor import Tensor
from datastates.exporting import copying
from datastates.exporting.layouts import torch_file_of
from datastates.providers import from_state_dict, from_stateful


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.is_contiguous() and torch.equal(a, b)


@pytest.mark.parametrize(("suffix", "dtype"), [(".pt", None), (".ckpt", "bf16")])
def test_torch_loads_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    suffix: str,
    dtype: str | None,
) -> None:
    monkeypatch.setattr(copying, "MOST_MEMORY", 3 * 64 << 10)  # so that tensors and headers lie in several windows
    embedding = torch.randn(300, 7, dtype=torch.bfloat16)
    state = {
        "embedding": embedding,
        "transposed": torch.randn(50, 60).t(),
        "head": embedding,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
        "complex": torch.randn(5, dtype=torch.complex128),
        "packed": torch.arange(8).to(torch.uint16),
        "odd": torch.randn(100_003, dtype=torch.float64),
        **{f"small.{i}": torch.full((i,), float(i)) for i in range(600)},
    }
    ds.snapshot([from_state_dict("model", state | {"epoch": 5})], tmp_path / "saved").wait_committed()
    target = tmp_path / f"weights{suffix}"
    progress: list[int] = []
    done = ds.export(tmp_path / "saved", target, dtype=dtype, progress=lambda now, _: progress.append(now))
    assert (done.files, done.tied, done.unproven) == ((target.name,), {"head": "embedding"}, ("model/transposed",))
    assert sum(progress) == done.nbytes == target.stat().st_size
    cast = {k: v.to(torch.bfloat16) if dtype and v.is_floating_point() else v for k, v in state.items()}
    ways: list[dict[str, Any]] = [{}, {"mmap": True}, {"weights_only": False}]
    for way in ways:
        read = torch.load(target, **way)
        assert type(read) is dict
        assert read.keys() == state.keys()
        assert all(same(read[key], tensor) for key, tensor in cast.items())
        assert read["head"].untyped_storage().data_ptr() == read["embedding"].untyped_storage().data_ptr()
    with zipfile.ZipFile(target) as archive:
        assert archive.testzip() is None
    assert commands.main(["verify", str(target)]) == 0
    assert "a file of torch.save" in capsys.readouterr().out
    assert not ds.export(target, tmp_path / "again.pt").unproven
    assert (tmp_path / "again.pt").stat().st_size == done.nbytes


def test_a_model_loads_it_and_names_are_those_of_safetensors(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    providers = [from_stateful("model", model), from_stateful("optim", optimizer)]
    ds.snapshot(providers, tmp_path / "saved").wait_committed()
    ds.export(tmp_path / "saved", tmp_path / "model.bin", keys="model/*")
    other.load_state_dict(torch.load(tmp_path / "model.bin"))
    assert torch.equal(other.weight, model.weight)
    ds.export(tmp_path / "saved", tmp_path / "all.pth", rename={"model/": "net."})
    read = torch.load(tmp_path / "all.pth")
    assert {"net.weight", "net.bias"} < read.keys()
    assert any(key.startswith("optim/") for key in read)
    with pytest.raises(ValueError, match="one file"):
        ds.export(tmp_path / "saved", tmp_path / "x.pt", shard_size="1GB")


def test_types_that_torch_lacks_are_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "MOST_MEMORY", 3 * 4 << 10)
    names = ("int4", "uint2", "float8_e3m4", "float8_e4m3")
    state = {name: (np.arange(10_000) % 4).astype(getattr(ml_dtypes, name)).reshape(100, 100) for name in names}
    state["t"] = state["int4"].T
    ds.snapshot([from_state_dict("m", state)], tmp_path / "saved").wait_committed()
    done = ds.export(tmp_path / "saved", tmp_path / "out.pt", dtype="bf16")
    read = torch.load(tmp_path / "out.pt")
    assert (done.tied, done.unproven) == ({}, ("m/t",))
    for name, array in state.items():
        assert read[name].dtype == torch.uint8
        assert np.array_equal(read[name].numpy(), np.ascontiguousarray(array).view(np.uint8))
    with pytest.raises(ValueError, match="'m/int4' is of type int4, which torch's reader of safetensors lacks"):
        ds.export(tmp_path / "saved", tmp_path / "out.safetensors", keys="m/int4")


def test_a_torch_file_of_more_than_4_gib(tmp_path: Path) -> None:
    names = {"large": 5 << 30, "small": 1000, "also": 3000}
    file = torch_file_of("x.pt", [Tensor(f"m/{n}", n, "uint8", (size,)) for n, size in names.items()], {}, 16 << 20)
    path, plan = tmp_path / "x.pt", file.plan
    crcs = constants(np.array(list(names.values()), np.uint64))  # of zeros
    with path.open("wb") as written:  # the tensors are holes
        for extent, offset in enumerate(plan.extent_offset.tolist()):
            for piece in range(int(plan.extent_piece[extent]), int(plan.extent_piece[extent + 1])):
                if plan.piece_source[piece] < 0:
                    begin, length = int(plan.piece_source_offset[piece]), int(plan.piece_length[piece])
                    written.seek(offset + int(plan.piece_extent_offset[piece]))
                    written.write(file.literal[begin : begin + length])
        for extent, at, source in zip(plan.patch_extent, plan.patch_offset, plan.patch_source, strict=True):
            written.seek(int(plan.extent_offset[extent]) + int(at))
            written.write(int(crcs[source]).to_bytes(4, "little"))
        written.seek(plan.end)
        written.write(file.encode_tail(crcs))
    assert path.stat().st_size == file.nbytes
    read = torch.load(path, mmap=True)
    assert {name: tensor.numel() for name, tensor in read.items()} == names
    assert not read["also"].any()
    with zipfile.ZipFile(path) as archive:
        assert archive.read("archive/data/2") == bytes(1000)  # it lies behind the large one, and has a checksum
    with ds.open(path) as opened:
        assert opened["small"].numel() == 1000
    os.truncate(path, file.nbytes - 1)
    with pytest.raises(RuntimeError, match="central directory"):
        torch.load(path, mmap=True)
    assert plan.extent_length.max() <= 16 << 20
    assert (plan.data_offset[plan.source_nbytes[plan.order] >= 1 << 16] % PAGE == 0).all()
