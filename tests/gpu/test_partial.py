"""Restoring other element types and some keys onto a GPU, and exporting what a GPU has saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import datastates as ds
from datastates.providers import from_state_dict, from_stateful
from datastates.reading import casting


@pytest.mark.parametrize("stored", ["cpu", "cuda"])
@pytest.mark.parametrize("window", [1 << 16, casting.WINDOW])
def test_types_are_converted_onto_a_gpu(
    stored: str, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(casting, "WINDOW", window)
    state = {"w": torch.randn(700, 300, device=stored), "n": torch.arange(5, device=stored), "f": 2.5}
    ds.snapshot([from_state_dict("s", dict(state))], tmp_path / "saved").wait_committed()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        live = {
            "w": torch.zeros(700, 300, dtype=dtype, device="cuda"),
            "n": torch.zeros(5, dtype=torch.int64, device="cuda"),
            "f": 0.0,
        }
        done = ds.restore([from_state_dict("s", live)], tmp_path / "saved", cast=True)
        assert list(done.cast_keys) == ["s/w"]
        assert torch.equal(live["w"].cpu(), state["w"].to(dtype).cpu())
        assert torch.equal(live["n"].cpu(), state["n"].cpu())


def test_some_keys_are_restored_onto_a_gpu(tmp_path: Path) -> None:
    def made(value: float) -> torch.nn.ModuleDict:
        model = torch.nn.ModuleDict({"base": torch.nn.Linear(64, 64), "lora_A": torch.nn.Linear(64, 8)}).cuda()
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, value)
        return model

    ds.snapshot([from_stateful("model", made(1.0))], tmp_path / "saved").wait_committed()
    live = made(2.0)
    ds.restore([from_stateful("model", live)], tmp_path / "saved", keys="model/*lora_*")
    assert {float(p.detach().flatten()[0]) for n, p in live.named_parameters() if "lora_" in n} == {1.0}
    assert {float(p.detach().flatten()[0]) for n, p in live.named_parameters() if "base" in n} == {2.0}


def test_what_a_gpu_saved_is_exported(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = {"w": torch.randn(1000, 3000, device="cuda"), "b": torch.randn(30, device="cuda").bfloat16()}
    ds.snapshot([from_state_dict("s", dict(state))], tmp_path / "saved").wait_committed()
    assert ds.export(tmp_path / "saved", tmp_path / "out").unproven == ()
    read = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(read[key], value.cpu()) for key, value in state.items())
