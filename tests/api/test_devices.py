"""The device that ``load`` and ``open`` read tensors to, and the reads that begin while memory is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import datastates as ds
from datastates.errors import CorruptError, TrustError
from datastates.providers import PickledObjectProvider, from_state_dict
from datastates.reading import new_arrays
from datastates.reading.read_queue import Ranges


class Custom:
    """An object that is read back with trust only."""


def save(path: Path, *more: Any) -> dict[str, Any]:
    state = {f"w{i}": torch.randn(300_000 + i) for i in range(5)} | {"n": np.arange(9), "none": torch.empty(0, 3)}
    ds.snapshot([from_state_dict("s", state), *more], path).wait_committed()
    return state


@pytest.mark.parametrize("call", [ds.load, ds.open])
@pytest.mark.parametrize(
    ("device", "error", "match"),
    [
        ("gpu", ValueError, "'gpu' is no device"),
        ("meta", ValueError, "'meta' is neither the CPU nor a CUDA device"),
        ("cuda:99", ValueError, "'cuda:99' does not exist: torch finds . CUDA devices"),
        (99, ValueError, "99 does not exist|99 is no device"),
        (True, TypeError, "True is no device"),
        (None, TypeError, "None is no device"),
        (1.5, TypeError, "1.5 is no device"),
    ],
)
def test_what_is_no_device_is_refused(tmp_path: Path, call: Any, device: Any, error: Any, match: str) -> None:
    save(tmp_path / "c")
    with pytest.raises(error, match=match):
        call(tmp_path / "c", device=device)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_the_cpu_is_a_device(tmp_path: Path, device: Any) -> None:
    state = save(tmp_path / "c")
    loaded = ds.load(tmp_path / "c", device=device)["s"]
    assert all(torch.equal(loaded[f"w{i}"], state[f"w{i}"]) for i in range(5))
    with ds.open(tmp_path / "c", device=device) as opened:
        assert torch.equal(opened["s/w1"], state["w1"])
        assert (opened["s/n"] == state["n"]).all()


@pytest.fixture
def many_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record is read by a job of its own."""
    monkeypatch.setattr(new_arrays, "READ_AT_ONCE", 1)


@pytest.mark.usefixtures("many_jobs")
def test_reads_begin_before_all_memory_is_allocated(tmp_path: Path) -> None:
    state = save(tmp_path / "c")
    loaded = ds.load(tmp_path / "c")["s"]
    assert all(torch.equal(loaded[f"w{i}"], state[f"w{i}"]) for i in range(5))
    assert (loaded["n"] == state["n"]).all()
    assert loaded["none"].shape == (0, 3)


def test_many_small_arrays_are_queued_in_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is sorted when its bytes are asked for: asked at each record, 20,000 records took 14 s instead of 1."""
    sorted_rows: list[int] = []
    joined = Ranges.joined

    def counting(parts: Sequence[Ranges]) -> Ranges:
        sorted_rows.append(sum(len(part.offset) for part in parts))
        return joined(parts)

    state = {f"w{i}": torch.full((3,), float(i)) for i in range(200)}
    ds.snapshot([from_state_dict("s", state)], tmp_path / "c").wait_committed()
    monkeypatch.setattr(Ranges, "joined", staticmethod(counting))
    loaded = ds.load(tmp_path / "c")["s"]
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    assert sum(sorted_rows) <= 3 * len(state)


@pytest.mark.usefixtures("many_jobs")
def test_damage_in_any_of_the_jobs_is_found(tmp_path: Path) -> None:
    state = save(tmp_path / "c")
    file = tmp_path / "c" / "rank-00000.pt"
    for i in range(5):
        good = file.read_bytes()
        damaged = bytearray(good)
        damaged[good.index(state[f"w{i}"].numpy().tobytes()) + 700_000] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(CorruptError, match=f"s/w{i}"):
            ds.load(tmp_path / "c")
        file.write_bytes(good)


@pytest.mark.usefixtures("many_jobs")
def test_an_untrusted_object_stops_the_reads(tmp_path: Path) -> None:
    save(tmp_path / "c", PickledObjectProvider("object", Custom, lambda _: None))
    with pytest.raises(TrustError, match="Custom"):
        ds.load(tmp_path / "c")
    assert type(ds.load(tmp_path / "c", trust=[f"{Custom.__module__}.Custom"])["object"]) is Custom
