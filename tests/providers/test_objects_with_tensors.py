"""Tensors and storages inside objects of other classes are arrays; the file needs no trust in torch's own pickles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates as ds
from datastates.providers import from_state_dict


class Plain:
    """Keeps what it is given, and says that it needs no tensor to be built."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Built(Plain):
    """Its code needs a tensor to be built, as that of a consolidated TensorDict."""

    def __reduce__(self) -> Any:
        return _built, (self.value,)


def _built(value: Any) -> Built:
    return Built(value[:2].view(-1))


class Asked(Plain):
    """Its code needs a tensor to be pickled."""

    def __getstate__(self) -> Any:
        assert self.value.numel() == 6
        return vars(self)


class Fresh(Plain):
    """Makes another tensor each time it is pickled."""

    def __getstate__(self) -> Any:
        return {"value": self.value.cpu() + 0}


CASES: dict[str, Callable[[], Any]] = {
    "untyped storage": lambda: Plain(torch.arange(3.0).untyped_storage()),
    "typed storage": lambda: Plain([torch.arange(3.0)._typed_storage()]),
    "tensor that its builder cuts": lambda: Built(torch.arange(6.0)),
    "tensor that it is asked about": lambda: Asked(torch.arange(6.0)),
}


def _parts(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [part for item in value for part in _parts(item)]
    if isinstance(value, torch.TypedStorage):
        value = value._untyped_storage
    return [value.tolist()]


@pytest.mark.parametrize("case", CASES)
def test_they_come_back_as_by_torch(tmp_path: Path, case: str) -> None:
    value = CASES[case]()
    classes = [Plain, Built, Asked, _built]
    torch.save({"x": value}, tmp_path / "stock.pt")
    ds.snapshot([from_state_dict("s", {"x": value})], tmp_path / "c").wait_committed()
    with torch.serialization.safe_globals(classes):
        stock = torch.load(tmp_path / "stock.pt", weights_only=True)["x"]
        of_torch = torch.load(tmp_path / "c" / "rank-00000.pt", weights_only=True)["s"]["x"]
    trust = [f"{kind.__module__}.{kind.__qualname__}" for kind in classes]
    live = {"x": None}
    ds.restore([from_state_dict("s", live)], tmp_path / "c", trust=trust)
    for found in (of_torch, live["x"], ds.load(tmp_path / "c", trust=trust)["s"]["x"]):
        assert type(found) is type(stock)
        assert _parts(found.value) == _parts(stock.value)
    with ds.open(tmp_path / "c") as opened:
        assert len(opened) == 1


def test_a_copy_is_saved_although_the_object_changes(tmp_path: Path) -> None:
    value = Built(torch.arange(6.0))
    snapshot = ds.snapshot([from_state_dict("s", {"x": value})], tmp_path / "c")
    value.value.zero_()
    snapshot.wait_committed()
    assert ds.load(tmp_path / "c", trust="all")["s"]["x"].value.tolist() == [0, 1]


def test_an_object_that_makes_other_tensors_each_time_is_saved_whole(tmp_path: Path) -> None:
    value = Fresh(torch.arange(6.0))
    ds.snapshot([from_state_dict("s", {"x": value})], tmp_path / "c").wait_committed()
    assert ds.load(tmp_path / "c", trust="all")["s"]["x"].value.tolist() == value.value.tolist()
