"""Tensors of torch's own subclasses on a GPU: all their parts come back, and the tensors are rebuilt on the CPU."""

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
    assert torch.equal(live["semi"].packed.cpu(), semi.packed.cpu())
    assert [p.tolist() for p in live["jagged"].unbind()] == [p.tolist() for p in jagged.unbind()]
