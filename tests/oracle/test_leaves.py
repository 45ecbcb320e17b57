"""What ``torch.load`` builds without trust comes back without trust from our checkpoints and from torch's files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import torch
from leaves import LEAVES
from portrait import differences, portrait
from subject import seed
from torch._dynamo import decorators
from torch.nested._internal import nested_tensor

import datastates as ds
from datastates.errors import TrustError
from datastates.providers import from_state_dict


def made(number: int) -> dict[str, Any]:
    """All leaves; those of one seed are equal."""
    seed(number)
    return {name: make() for name, make in LEAVES.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of torch and a checkpoint."""
    folder = tmp_path_factory.mktemp("leaves")
    torch.save(made(1), folder / "stock.pt")
    ds.snapshot([from_state_dict("leaves", made(1))], folder / "ours").wait_committed()
    return folder


def loaded(file: Path) -> Any:
    """What torch builds of a file without trust; it adds these names itself, once they are imported."""
    names = [nested_tensor.NestedTensor, nested_tensor._rebuild_njt, decorators._DimRange]
    with torch.serialization.safe_globals(names):
        return torch.load(file, weights_only=True)


def assert_alike(ours: Any, stock: Any) -> None:
    found = [
        line for name in stock for line in differences(portrait({name: ours[name]}), portrait({name: stock[name]}))
    ]
    assert not found, "\n".join(found)


def test_restored(saved: Path) -> None:
    live = made(2)
    ds.restore([from_state_dict("leaves", live)], saved / "ours")
    assert_alike(live, loaded(saved / "stock.pt"))


def test_loaded(saved: Path) -> None:
    assert_alike(ds.load(saved / "ours", framework="pt")["leaves"], loaded(saved / "stock.pt"))


def test_loaded_by_torch(saved: Path) -> None:
    (file,) = (saved / "ours").glob("*.pt")
    assert_alike(loaded(file)["leaves"], loaded(saved / "stock.pt"))


def test_loaded_from_a_file_of_torch(saved: Path) -> None:
    assert_alike(ds.load(saved / "stock.pt", framework="pt"), loaded(saved / "stock.pt"))


def test_what_the_program_has_declared_safe_needs_no_trust(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def state(number: int) -> dict[str, Any]:
        return {"space": SimpleNamespace(n=number, t=torch.full((2,), float(number))), "id": UUID(int=number)}

    live = state(2)
    torch.save(state(1), tmp_path / "t.pt")
    with torch.serialization.safe_globals([SimpleNamespace, (UUID, "uuid.UUID")]):
        ds.snapshot([from_state_dict("declared", state(1))], tmp_path / "c").wait_committed()
        stock = torch.load(tmp_path / "t.pt", weights_only=True)
        for found in (ds.load(tmp_path / "c")["declared"], ds.load(tmp_path / "t.pt")):
            assert_alike(found, stock)
        ds.restore([from_state_dict("declared", live)], tmp_path / "c")
        assert_alike(live, stock)
        with pytest.raises(TrustError):
            ds.load(tmp_path / "c", framework="np")
    assert "trust" not in caplog.text
    with pytest.raises(TrustError):
        ds.load(tmp_path / "c")
