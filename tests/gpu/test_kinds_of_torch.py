"""Tensors of torch's own subclasses on a GPU: all their parts come back, onto the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.sparse import to_sparse_semi_structured

import datastates as ds
from datastates.providers import from_state_dict


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, that these are prototypes
def test_semi_structured_and_jagged_tensors_come_back(tmp_path: Path) -> None:
    pattern = torch.tensor([0, 0, 1, 1], dtype=torch.half, device="cuda").tile((128, 32))
    semi = to_sparse_semi_structured(pattern * torch.rand_like(pattern))
    jagged = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=torch.jagged, device="cuda")
    ds.snapshot([from_state_dict("s", {"semi": semi, "jagged": jagged})], tmp_path / "c").wait_committed()
    live = {
        "semi": to_sparse_semi_structured(pattern.clone()),
        "jagged": torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=torch.jagged, device="cuda"),
    }
    ds.restore([from_state_dict("s", live)], tmp_path / "c", trust="all")
    assert type(live["semi"]) is type(semi)
    assert torch.equal(live["semi"].packed, semi.packed)
    assert live["jagged"].is_cuda
    assert [p.tolist() for p in live["jagged"].unbind()] == [p.tolist() for p in jagged.unbind()]


class Noted(torch.Tensor):
    """A subclass with a storage."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["subclass", "sparse", "nested"])
def test_a_rebuilt_tensor_is_on_the_device_of_the_live_one(tmp_path: Path, kind: str) -> None:
    def make(factor: int) -> torch.Tensor:
        dense = factor * torch.arange(6.0, device="cuda").reshape(2, 3)
        if kind == "sparse":
            return dense.to_sparse()
        if kind == "nested":
            return torch.nested.nested_tensor([*dense], device="cuda")
        made = dense.as_subclass(Noted)
        made.note = [factor]  # type: ignore[attr-defined]
        return made

    ds.snapshot([from_state_dict("s", [make(1)])], tmp_path / "c").wait_committed()
    live = [make(2)]
    ds.restore([from_state_dict("s", live)], tmp_path / "c", trust="all")
    assert type(live[0]) is type(make(1))
    assert live[0].is_cuda
    values = [t.to_dense() if kind == "sparse" else t for t in (live[0], make(1))]
    assert [row.tolist() for row in values[0].unbind()] == [row.tolist() for row in values[1].unbind()]
    assert getattr(live[0], "note", [1]) == [1]
