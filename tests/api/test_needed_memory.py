"""Calls that need more memory than is free are refused before they read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import datastates as ds
from datastates._base import free_memory
from datastates.errors import OutOfMemoryError
from datastates.formats import own
from datastates.providers import from_state_dict
from datastates.reading.needed_memory import needed, refuse_too_large
from datastates.state import devices
from datastates.state.new_memory import AS_SAVED, Into
from datastates.storage.location import Location

CUDA = Into("pt", torch.device("cuda", 1))


@pytest.fixture
def state() -> dict[str, Any]:
    """3,000,000 bytes of torch's arrays, two of which share memory, and 8,000,000 of NumPy's."""
    shared = torch.ones(500_000)
    return {"w": shared, "tied": shared.view(2, -1), "b": torch.ones(250_000), "n": np.ones(1_000_000)}


@pytest.fixture
def saved(state: dict[str, Any], tmp_path: Path) -> Path:
    ds.snapshot([from_state_dict("s", state)], tmp_path / "c").wait_committed()
    return tmp_path / "c"


def free(monkeypatch: pytest.MonkeyPatch, host: int, device: int = 0) -> None:
    monkeypatch.setattr(free_memory, "host_memory", lambda swap: host)
    monkeypatch.setattr(devices, "free_memory", lambda which: device)


def test_load_says_what_it_needs(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free(monkeypatch, 10_999_999)
    with caplog.at_level(logging.DEBUG, "datastates"), pytest.raises(OutOfMemoryError) as raised:
        ds.load(saved)
    assert str(raised.value).startswith(f"{saved} needs 0.011 GB of host memory, 0.011 GB are free: read single")
    assert (raised.value.needed, raised.value.free) == (11_000_000, 10_999_999)
    assert f"{saved} needs 0.011 GB of host memory, 0.011 GB are free" in caplog.messages
    free(monkeypatch, 11_000_000)
    assert ds.load(saved)["s"]["n"].sum() == 1_000_000


def test_a_device_needs_what_torch_reads_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = own.open(Location(saved))
    assert needed(opened.files, AS_SAVED) == (11_000_000, 0)
    assert needed(opened.files, CUDA) == (8_000_000, 3_000_000)
    free(monkeypatch, 8_000_000, 2_999_999)
    with pytest.raises(OutOfMemoryError, match=r"needs 0\.003 GB of memory of cuda:1, 0\.003 GB are free"):
        refuse_too_large(Location(saved), opened.files, CUDA)
    free(monkeypatch, 8_000_000, 3_000_000)
    refuse_too_large(Location(saved), opened.files, CUDA)
    free(monkeypatch, 7_999_999, 3_000_000)
    with pytest.raises(OutOfMemoryError, match="of host memory"):
        refuse_too_large(Location(saved), opened.files, CUDA)


def test_other_formats_say_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(1000), "step": 3}, tmp_path / "m.pt")
    free(monkeypatch, 3999)
    with pytest.raises(OutOfMemoryError) as raised:
        ds.load(tmp_path / "m.pt")
    assert raised.value.needed == 4000


def test_open_and_export_need_no_room_for_all(
    saved: Path, state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 0)
    with ds.open(saved) as opened:
        assert torch.equal(opened["s/w"], state["w"])
    ds.export(saved, tmp_path / "m.safetensors")


def test_open_refuses_an_array_larger_than_the_window(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datastates.reading.needed_memory.LARGE", 7_999_999)
    free(monkeypatch, 7_999_999)
    with ds.open(saved) as opened:
        with pytest.raises(OutOfMemoryError) as raised:
            opened["s/n"]
        with pytest.raises(OutOfMemoryError):
            opened.part("s/n", ...)
        assert opened.part("s/n", slice(1, None)).size == 999_999
        free(monkeypatch, 8_000_000)
        assert opened["s/n"].sum() == 1_000_000
    assert raised.value.needed == 8_000_000
