"""``load`` and ``open`` read tensors straight onto a GPU, as ``torch.load(map_location=…)`` puts them there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import datastates as ds
from datastates.errors import CorruptError
from datastates.providers import from_state_dict
from datastates.reading import new_arrays, tensors_ahead

DEVICES = ["cuda", 0, torch.device("cuda:0")]


def save(path: Path, **options: Any) -> dict[str, Any]:
    flat = torch.randn(3_000_000, device="cuda")
    state = {
        "large": torch.randn(5_000_000, device="cuda").to(torch.bfloat16),
        "view": flat[:1_000_000].view(1000, 1000).t(),
        "tied": flat,
        "small": torch.arange(7, device="cuda"),
        "scalar": torch.tensor(3.5, device="cuda"),
        "none": torch.empty(0, 4, device="cuda"),
        "host": torch.randn(1000),
        "parameter": torch.nn.Parameter(torch.randn(1000, device="cuda")),
        "numpy": np.arange(10),
        "step": 5,
    }
    ds.snapshot([from_state_dict("s", state)], path, **options).wait_committed()
    return state


def check(found: Any, state: dict[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert found[key].device == torch.device("cuda:0"), key
            assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape), key
            assert torch.equal(found[key].detach(), value.detach().cuda()), key


@pytest.mark.parametrize("device", DEVICES, ids=repr)
@pytest.mark.parametrize("at_once", [1, 1 << 30])
def test_tensors_are_loaded_onto_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Any, at_once: int
) -> None:
    monkeypatch.setattr(new_arrays, "READ_AT_ONCE", at_once)
    monkeypatch.setattr(tensors_ahead, "FIRST_NBYTES", at_once)
    state = save(tmp_path / "c")
    found = ds.load(tmp_path / "c", device=device)["s"]
    check(found, state)
    assert isinstance(found["parameter"], torch.nn.Parameter)
    assert found["parameter"].requires_grad
    assert found["view"].data_ptr() == found["tied"].data_ptr()
    assert type(found["numpy"]) is np.ndarray
    assert found["step"] == 5
    with ds.open(tmp_path / "c", device=device) as opened:
        check({key.removeprefix("s/"): opened[key] for key in opened}, state)
        check({key.removeprefix("s/"): array for key, array in opened.items()}, state)
        assert (opened["s/numpy"] == state["numpy"]).all()


def test_damage_is_found(tmp_path: Path) -> None:
    state = save(tmp_path / "c")
    file = tmp_path / "c" / "rank-00000.pt"
    data = bytearray(file.read_bytes())
    data[data.index(state["large"].view(torch.uint8).cpu().numpy().tobytes()) + 9_000_001] ^= 64
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="s/large"):
        ds.load(tmp_path / "c", device="cuda")
    with ds.open(tmp_path / "c", device="cuda") as opened:
        assert torch.equal(opened["s/small"], state["small"])
        with pytest.raises(CorruptError, match="s/large"):
            opened["s/large"]
        with pytest.raises(CorruptError, match="s/large"):
            dict(opened.items())


def test_work_on_the_current_stream_does_not_race_with_the_load(tmp_path: Path) -> None:
    """Memory that the allocator gives again may still be used by kernels before the load."""
    state = save(tmp_path / "c")
    for _ in range(5):
        busy = [torch.zeros(5_000_000, dtype=torch.bfloat16, device="cuda") for _ in range(8)]
        torch.cuda._sleep(100_000_000)
        for block in busy:
            block.fill_(1)
        del busy
        check(ds.load(tmp_path / "c", device="cuda")["s"], state)


PARTS = """
import os, sys
from dataclasses import replace
import torch, datastates as ds

rank = int(os.environ["RANK"])
whole = torch.arange(4000.0).reshape(40, 100)
rows, columns = whole[rank * 20 : rank * 20 + 20], whole[:, rank * 50 : rank * 50 + 50].contiguous()

class Parts(ds.StateProvider):
    def shards(self):
        parts = ("rows", rows, (rank * 20, 0)), ("columns", columns, (0, rank * 50))
        return [replace(ds.array_shard(key, part), global_shape=(40, 100), offset=at) for key, part, at in parts]

ds.snapshot([Parts("p")], sys.argv[1], rank=rank, world_size=2).wait_committed()
"""


def test_parts_of_several_ranks_are_put_together_on_the_gpu(tmp_path: Path, ranks: Any) -> None:
    ranks(2, PARTS, tmp_path / "c")
    whole = torch.arange(4000.0, device="cuda").reshape(40, 100)
    found = ds.load(tmp_path / "c", device="cuda")["p"]
    assert torch.equal(found["rows"], whole)
    assert torch.equal(found["columns"], whole)
    with ds.open(tmp_path / "c", device="cuda") as opened:
        assert torch.equal(opened["p/columns"], whole)


@pytest.mark.parametrize("device", DEVICES, ids=repr)
def test_parts_are_read_onto_the_gpu(tmp_path: Path, device: Any) -> None:
    matrix = torch.randn(3000, 2000, device="cuda").to(torch.bfloat16)
    ds.snapshot([from_state_dict("s", {"m": matrix, "t": matrix.t()})], tmp_path / "c").wait_committed()
    torch.save({"m": matrix}, tmp_path / "m.pt")
    with ds.open(tmp_path / "c", device=device) as opened, ds.open(tmp_path / "m.pt", device=device) as of_torch:
        for index in [(slice(100, 900),), (slice(None), slice(512, 1024)), (7, slice(3, 4)), (..., -1), (slice(5, 5),)]:
            for found, whole in (
                (opened.part("s/m", index), matrix),
                (opened.part("s/t", index), matrix.t()),
                (of_torch.part("m", index), matrix),
            ):
                assert found.device == torch.device("cuda:0")
                assert torch.equal(found, whole[index])
        for dim in (0, 1):
            assert torch.equal(opened.shard("s/m", dim, 1, 4), matrix.chunk(4, dim)[1])
