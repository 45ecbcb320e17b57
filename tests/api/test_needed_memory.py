"""Calls that need more memory than is free are refused before they read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heap
import numpy as np
import pytest
import torch

import datastates as ds
from datastates._base import free_memory
from datastates.errors import OutOfMemoryError
from datastates.formats import own
from datastates.providers import PickledObjectProvider, from_pytree, from_state_dict, from_stateful
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
    monkeypatch.setattr("datastates.reading.checkpoint.MOST_NBYTES", 7_999_999)
    free(monkeypatch, 7_999_999)
    with ds.open(saved) as opened:
        with pytest.raises(OutOfMemoryError) as raised:
            opened["s/n"]
        free(monkeypatch, 8_000_000)
        assert opened["s/n"].sum() == 1_000_000
    assert raised.value.needed == 8_000_000


# --- restores: only memory that was never accessed counts

NUMEL = 20 << 20
NBYTES = 4 * NUMEL
HUGE = 4 << 20
"""A page that is allocated with an array's header may be a huge one. The next array may have one, too."""


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Two arrays of ``NBYTES`` bytes each."""
    state = {"a": np.ones(NUMEL, np.float32), "b": torch.ones(NUMEL)}
    ds.snapshot([from_state_dict("s", state)], tmp_path / "large").wait_committed()
    del state
    heap.trim()
    return tmp_path / "large"


def check_need(monkeypatch: pytest.MonkeyPatch, expected: int, read: Callable[[], Any]) -> Any:
    """Check that ``read`` is refused for lack of ``expected`` bytes, and done with so many; returns its result."""
    free(monkeypatch, expected - HUGE - 1)
    heap.trim()
    with pytest.raises(OutOfMemoryError, match=r"of host memory.*: read some arrays at a time, by keys=") as raised:
        read()
    assert expected - HUGE <= raised.value.needed <= expected
    free(monkeypatch, expected)
    return read()


def test_live_arrays_need_no_room(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = {"a": np.zeros(NUMEL, np.float32) + 2, "b": torch.zeros(NUMEL)}
    free(monkeypatch, 0)
    ds.restore([from_state_dict("s", live)], large)
    assert live["a"].sum() == live["b"].sum() == NUMEL


def test_arrays_that_were_never_written_need_room(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = {"a": np.empty(NUMEL, np.float32), "b": torch.zeros(NUMEL)}
    check_need(monkeypatch, NBYTES, lambda: ds.restore([from_state_dict("s", live)], large))
    assert live["a"].sum() == live["b"].sum() == NUMEL


def test_arrays_that_are_copied_into_place_need_room(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = {"a": np.zeros(NUMEL, np.float32) + 2, "b": torch.zeros(2 * NUMEL)[::2]}
    check_need(monkeypatch, NBYTES, lambda: ds.restore([from_state_dict("s", live)], large))
    assert live["b"].sum() == NUMEL


def test_arrays_that_are_converted_need_room_if_they_were_never_written(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = {"b": torch.empty(NUMEL, dtype=torch.float64), "a": np.zeros(NUMEL, np.float16) + 2}
    check_need(monkeypatch, 2 * NBYTES, lambda: ds.restore([from_state_dict("s", live)], large, cast=True))
    free(monkeypatch, 0)
    ds.restore([from_state_dict("s", live)], large, cast=True)
    assert (live["a"] == 1).all()
    assert (live["b"] == 1).all()


def test_load_like_needs_room_for_its_arrays(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    like = {"a": np.zeros(NUMEL, np.float32), "b": torch.zeros(NUMEL)}
    found = check_need(monkeypatch, 2 * NBYTES, lambda: ds.load(large, like={"s": like}))
    assert found["s"]["a"].sum() == found["s"]["b"].sum() == NUMEL


def test_load_like_needs_room_for_arrays_of_jax(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    like = {"s": dict.fromkeys("ab", jax.ShapeDtypeStruct((NUMEL,), np.float32))}
    found = check_need(monkeypatch, 2 * NBYTES, lambda: ds.load(large, like=like))
    assert found["s"]["a"].sum() == NUMEL


def test_load_like_of_another_format_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(NUMEL)}, tmp_path / "m.pt")
    found = check_need(monkeypatch, NBYTES, lambda: ds.load(tmp_path / "m.pt", like={"w": torch.zeros(NUMEL)}))
    assert found["w"].sum() == NUMEL


def test_selected_keys_need_room_alone(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = from_pytree("s", {"a": np.zeros(NUMEL, np.float32), "b": torch.zeros(NUMEL)})
    check_need(monkeypatch, NBYTES, lambda: ds.restore([provider], large, keys="s/b"))
    assert provider.tree["b"].sum() == NUMEL


def test_pickled_objects_need_room_for_their_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = [np.ones(NUMEL, np.float32)]
    provider = PickledObjectProvider("s", lambda: box, lambda value: box.__setitem__(slice(None), value))
    ds.snapshot([provider], tmp_path / "c").wait_committed()
    check_need(monkeypatch, NBYTES, lambda: ds.restore([provider], tmp_path / "c"))
    assert box[0].sum() == NUMEL


def test_a_new_optimizer_needs_room_for_its_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.zeros(NUMEL))
    weight.grad = torch.ones(NUMEL)
    old, new = (torch.optim.SGD([weight], lr=0.1, momentum=0.9) for _ in range(2))
    old.step()
    ds.snapshot([from_stateful("o", old)], tmp_path / "c").wait_committed()
    check_need(monkeypatch, NBYTES, lambda: ds.restore([from_stateful("o", new)], tmp_path / "c"))
    assert new.state[weight]["momentum_buffer"].sum() == NUMEL
    free(monkeypatch, 0)  # it has its states now
    ds.restore([from_stateful("o", new)], tmp_path / "c")
