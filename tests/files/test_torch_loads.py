"""Loads for frameworks say that memory is too little before they read."""

from __future__ import annotations

from pathlib import Path

import pytest

import datastates as ds
from datastates._base import free_memory
from datastates.config import IoSettings
from datastates.errors import OutOfMemoryError
from datastates.providers import from_state_dict

torch = pytest.importorskip("torch")
torch_loads = pytest.importorskip("datastates.files.torch_loads")


def test_tensors_for_the_host_need_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds.snapshot([from_state_dict("s", {"w": torch.ones(1000)})], tmp_path / "c").wait_committed()
    (file,) = (tmp_path / "c").glob("*.pt")
    monkeypatch.setattr(free_memory, "host_memory", lambda swap: 3999)
    for place in (None, "cpu", torch.device("cpu"), {"cpu": "cpu"}):
        with pytest.raises(OutOfMemoryError) as raised:
            torch_loads.load(file, IoSettings(), place, ())
        assert raised.value.needed == 4000
    found = torch_loads.load(file, IoSettings(), lambda storage, _: storage, ())  # it may choose any memory
    assert found["s"]["w"].sum() == 1000
