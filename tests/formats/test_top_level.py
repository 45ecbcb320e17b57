"""Files of torch.save whose value is no dict: a tensor, a list, a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command import run_json
from safetensors.torch import load_file

import datastates as ds
from datastates.cli import commands
from datastates.providers import from_pytree

VALUES: dict[str, Any] = {
    "tensor": torch.arange(5.0),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "list": [torch.ones(2), 3, {"a": torch.zeros(1)}],
    "tuple": (torch.ones(2), torch.zeros(1)),
    "number": 7,
    "text": "abc",
    "nothing": None,
}
TENSORS: dict[str, dict[str, torch.Tensor]] = {
    "tensor": {"": VALUES["tensor"]},
    "parameter": {"": VALUES["parameter"]},
    "list": {"0": VALUES["list"][0], "2/a": VALUES["list"][2]["a"]},
    "tuple": {"0": VALUES["tuple"][0], "1": VALUES["tuple"][1]},
}


@pytest.fixture(params=[True, False], ids=["zip", "legacy"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a file of each value."""
    for name, value in VALUES.items():
        torch.save(value, tmp_path / f"{name}.pt", _use_new_zipfile_serialization=request.param)
    return tmp_path


@pytest.mark.parametrize("name", VALUES)
def test_it_is_loaded_as_torch_loads_it(name: str, folder: Path) -> None:
    found, expected = ds.load(folder / f"{name}.pt"), torch.load(folder / f"{name}.pt")
    assert type(found) is type(expected)
    assert repr(found) == repr(expected)
    with ds.open(folder / f"{name}.pt") as opened:
        tensors = TENSORS.get(name, {})
        assert list(opened) == list(tensors)
        assert all(torch.equal(opened[key], tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("name", TENSORS)
def test_its_tensors_are_exported(name: str, suffix: str, folder: Path) -> None:
    to = folder / f"out.{suffix}"
    ds.export(folder / f"{name}.pt", to)
    written = torch.load(to) if suffix == "pt" else load_file(to)
    assert list(written) == [key or "tensor" for key in TENSORS[name]]
    assert all(torch.equal(written[key or "tensor"], tensor) for key, tensor in TENSORS[name].items())
    ds.export(folder / "tensor.pt", folder / "named.pt", rename={"tensor": "mean"})
    assert list(torch.load(folder / "named.pt")) == ["mean"]


def test_a_tensor_and_a_list_are_restored(folder: Path) -> None:
    tensor = from_pytree("statistics", torch.zeros(5))
    parts = from_pytree("parts", [torch.zeros(2), {"n": 1}, {"a": torch.ones(1)}])
    ds.restore([tensor], folder / "tensor.pt")
    ds.restore([parts], folder / "list.pt")
    assert torch.equal(tensor.tree, VALUES["tensor"])
    assert torch.equal(parts.tree[0], torch.ones(2))
    assert parts.tree[2]["a"].item() == 0


def test_the_value_is_called_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("tensor", "number"):
        assert commands.main(["inspect", str(folder / f"{name}.pt")]) == 0
        assert "\n(the value)  " in capsys.readouterr().out
    assert commands.main(["diff", str(folder / "number.pt"), str(folder / "text.pt")]) == 1
    assert capsys.readouterr().out.startswith("(the value) differs\n")
    status, found = run_json(capsys, "diff", folder / "list.pt", folder / "tensor.pt")
    assert (status, found["equal"]) == (1, False)
