"""Readers of a checkpoint with a kept container see the same as of one without."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import run, run_json

import datastates as ds
from datastates.errors import DatastatesError, RestoreError
from datastates.providers import (
    PickledObjectProvider,
    from_state_dict,
    from_stateful,
)

torch = pytest.importorskip("torch")
saves = pytest.importorskip("whole_saves")


pytestmark = pytest.mark.usefixtures("linking")


def delete(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    os.truncate(file, 100_000)


def test_ties_and_views(tmp_path: Path) -> None:
    memory, tied = torch.randn(60_000), torch.randn(300, 300)
    state = {
        "first": memory[:30_000],
        "all": memory,
        "square": memory[:40_000].view(200, 200).T,
        "tied": tied,
        "again": tied,
        "moves": torch.zeros(20_000),
    }
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(4):
            state["moves"] += 1
            report = saves.save(checkpointer, state, step)
    assert report["in_full"] == ""
    found = ds.load(tmp_path)["state"]
    saves.assert_equal(found, state)
    assert found["tied"] is found["again"]
    assert found["square"].stride() == state["square"].stride()
    live = saves.copy_of(state) | {"tied": (alike := torch.zeros(300, 300)), "again": alike}
    with ds.Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore([from_state_dict("state", live)])
    saves.assert_equal(live, state)


def test_readers_see_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = saves.a_state()
    with ds.Checkpointer(tmp_path / "linked", incremental=True) as checkpointer:
        for step in range(3):
            state["large.3"] += 1
            saves.save(checkpointer, state, step)
    linked = tmp_path / "linked" / "step-00000002"
    ds.snapshot([from_state_dict("state", state)], tmp_path / "plain", step=2).wait_committed()
    with ds.open(linked) as one, ds.open(tmp_path / "plain") as other:
        assert list(one) == list(other)
        assert all(torch.equal(one[key], other[key]) for key in other)
        assert all(one.digest(key) == other.digest(key) for key in other)
    ds.export(linked, tmp_path / "a.safetensors")
    ds.export(tmp_path / "plain", tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    for command in (
        ["verify", linked],
        ["diff", linked, tmp_path / "plain"],
        ["inspect", linked],
        ["ls", linked.parent],
    ):
        status, output = run(capsys, *command)
        assert status == 0, output


def test_kept_arrays_come_back_as_they_lay_in_memory(tmp_path: Path) -> None:
    state = saves.views() | {"moves": torch.zeros(20_000), "n": {"x": 1}}
    live: dict[str, Any] = {}
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(4):
            state["moves"] += 1
            snapshot = checkpointer.snapshot([PickledObjectProvider("state", lambda: state, live.update)], step=step)
            snapshot.wait_committed()
    assert snapshot.report.executor["in_full"] == ""
    with ds.Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore([PickledObjectProvider("state", lambda: state, live.update)])
    saves.assert_as_they_lay(live, state)


def test_a_frozen_array_that_repeats_elements_is_restored(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(300, 300)
            self.register_buffer("wide", torch.randn(60_000, 1).expand(60_000, 3))

    model = Model()
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(3):
            with torch.no_grad():
                model.layer.weight += 1
                model.layer.bias += 1
            checkpointer.snapshot([from_stateful("model", model)], step=step).wait_committed()
    assert saves.links_in(tmp_path, 2)["rank-00000.kept.pt"] > 1
    other = Model()
    with ds.Checkpointer(tmp_path) as checkpointer:
        try:
            checkpointer.restore([from_stateful("model", other)])
        except RestoreError as error:
            raise AssertionError(str(error)) from error
    assert torch.equal(other.layer.weight, model.layer.weight)


def test_an_extra_key_is_refused_as_without_a_kept_container(tmp_path: Path) -> None:
    state = saves.a_state()
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(3):
            state["large.0"] += 1
            saves.save(checkpointer, state, step)
        for step in (0, 2):
            live = saves.copy_of(state)
            del live["count"]
            with pytest.raises(RestoreError, match="count"):
                checkpointer.restore([from_state_dict("state", live)], step=step)


def test_who_shares_what_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = saves.a_state()
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(4):
            state["large.0"] += 1
            saves.save(checkpointer, state, step)
    status, found = run_json(capsys, "ls", "--added", tmp_path)
    assert status == 0
    whole, changing = found["checkpoints"][0]["bytes"], state["large.0"].nbytes
    added = [one["added"] for one in found["checkpoints"]]
    assert all(nbytes >= whole for nbytes in added[:2])
    assert all(nbytes < changing + 30_000 for nbytes in added[2:])
    status, output = run(capsys, "inspect", tmp_path / "step-00000003")
    assert status == 0
    assert "step 3, rank 0 of 1" in output
    assert "with step 1" in output or "step 2" in output


@pytest.mark.parametrize("change", [delete, cut])
def test_what_the_kept_container_does_not_hold_is_not_lost_with_it(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    state, kept = saves.kept_at_step_2(tmp_path)
    change(kept)
    path = tmp_path / "step-00000002"
    with ds.open(path) as checkpoint:
        assert torch.equal(checkpoint["state/large.0"], state["large.0"])
        assert len(checkpoint) == 10
    live = saves.copy_of(state) | {"large.0": torch.zeros_like(state["large.0"])}
    with ds.Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore([from_state_dict("state", live)], step=2, keys=["state/large.0"])
        assert torch.equal(live["large.0"], state["large.0"])
        with pytest.raises(DatastatesError, match=r"rank-00000\.kept\.pt"):
            checkpointer.restore([from_state_dict("state", live)], step=2)
    ds.export(path, tmp_path / "part.safetensors", keys=["state/large.0"])
