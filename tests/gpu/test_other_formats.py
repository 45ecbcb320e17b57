"""Checkpoints of other formats onto a GPU: read whole, by key, and into a live model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import datastates as ds
from datastates.providers import from_stateful


@pytest.fixture(params=["safetensors", "torch"])
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    state = {"w": torch.randn(1024, 1024), "b": torch.randn(1024), "low": torch.randn(999, 7).bfloat16()}
    if request.param == "torch":
        torch.save(state, tmp_path / "w.pt")
        return tmp_path / "w.pt", state
    save_file(state, str(tmp_path / "w.safetensors"))
    return tmp_path / "w.safetensors", state


def test_loaded_and_by_key(weights: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = weights
    loaded = ds.load(path, device="cuda")
    with ds.open(path, device="cuda") as tensors:
        for key, value in state.items():
            assert loaded[key].is_cuda
            assert torch.equal(loaded[key].cpu(), value)
            assert torch.equal(tensors[key].cpu(), value)


def test_into_a_live_model(weights: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = weights
    model = torch.nn.ParameterDict({k: torch.nn.Parameter(torch.zeros_like(v)) for k, v in state.items()}).cuda()
    ds.restore([from_stateful("model", model)], path, verify="digest")
    for key, value in state.items():
        assert torch.equal(model[key].detach().cpu(), value)
    model.half()
    restored = ds.restore([from_stateful("model", model)], path, cast=True)
    assert set(restored.cast_keys) == {f"model/{key}" for key in state}
    for key, value in state.items():
        assert torch.equal(model[key].detach().cpu(), value.half())
