"""A Trainer's folder: the weights under their names, and the other files under their stems."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import datastates as ds
from datastates.errors import FormatError, StorageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save({"last_epoch": 4}, tmp_path / "scheduler.pt")
    torch.save(object, tmp_path / "training_args.bin")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 500}')
    return tmp_path


def test_the_optimizer_is_beside_the_weights(folder: Path) -> None:
    with ds.open(folder, step=500) as opened:
        assert opened.step == 500
        assert list(opened)[:2] == ["bias", "weight"]
        moments = torch.load(folder / "optimizer.pt")["state"]
        assert torch.equal(opened["optimizer/state/0/exp_avg"], moments[0]["exp_avg"])
    found = ds.load(folder)
    assert found["scheduler"] == {"last_epoch": 4}
    assert found["optimizer"]["param_groups"] == torch.load(folder / "optimizer.pt")["param_groups"]
    assert "training_args" not in found


def test_the_weights_alone_are_exported(folder: Path, tmp_path: Path) -> None:
    done = ds.export(folder, tmp_path / "out.safetensors", keys=["weight", "bias"])
    assert done.objects == ()
    written, saved = load_file(tmp_path / "out.safetensors"), load_file(folder / "model.safetensors")
    assert all(torch.equal(written[key], tensor) for key, tensor in saved.items())


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_a_damaged_state_is_named(folder: Path, text: str) -> None:
    (folder / "trainer_state.json").write_text(text)
    with pytest.raises(FormatError, match=r"trainer_state\.json"):
        ds.open(folder)


def test_missing_weights_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(StorageError, match=r"neither model\.safetensors nor"):
        ds.load(folder)


def test_a_name_of_the_weights_and_of_the_optimizer_is_refused(folder: Path) -> None:
    save_file({"optimizer/state/0/exp_avg": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(FormatError, match="'optimizer/state/0/exp_avg' is in"):
        ds.open(folder)
