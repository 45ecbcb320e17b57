"""The reader begins with the file that a plan wants before the ranks have exchanged their plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

from datastates.adapters.dcp import DataStatesStorageReader
from datastates.container.file import open_container
from datastates.errors import CorruptError
from datastates.reading.reads import Reads
from states import Parts, save_with

MIB = 1 << 20


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are read ahead, and ``plans`` when the ranks exchange their plans."""
    events: list[str] = []
    begin, exchange = Reads.begin, DefaultLoadPlanner.create_global_plan

    def noted(reads: Reads, source: Any, executor: Any) -> None:
        events.append(source.path.name)
        begin(reads, source, executor)

    def exchanged(planner: DefaultLoadPlanner, plans: list[LoadPlan]) -> list[LoadPlan]:
        events.append("plans")
        return exchange(planner, plans)

    monkeypatch.setattr(Reads, "begin", noted)
    monkeypatch.setattr(DefaultLoadPlanner, "create_global_plan", exchanged)
    return events


def saved(path: Path) -> dict[str, torch.Tensor]:
    state = {f"layer{i}": torch.full((1024, 1024), float(i + 1)) for i in range(5)}
    save_with("ours", dict(state), path)
    return state


def test_what_a_plan_wants_whole_is_read_before_the_plans_are_exchanged(tmp_path: Path, begun: list[str]) -> None:
    state = saved(tmp_path / "saved")
    reader = DataStatesStorageReader(tmp_path / "saved")
    for _ in range(2):
        into = {key: torch.zeros_like(value) for key, value in state.items()}
        dcp.load(into, storage_reader=reader)
        assert all(torch.equal(into[key], value) for key, value in state.items())
        assert reader.tally is not None
        assert reader.tally.unverified_nbytes == 0
    assert begun == ["__0_0.distcp", "plans"] * 2


def test_what_is_wanted_in_part_is_not_read_ahead(tmp_path: Path, begun: list[str]) -> None:
    state = saved(tmp_path / "saved")
    some = {key: torch.zeros_like(state[key]) for key in ("layer1", "layer2", "layer3", "layer4")}
    dcp.load(some, storage_reader=DataStatesStorageReader(tmp_path / "saved"))
    columns = {key: Parts.of((1024, 1024), {(0, 512): torch.zeros(1024, 512)}) for key in state}
    dcp.load(dict(columns), storage_reader=DataStatesStorageReader(tmp_path / "saved"))
    assert begun == ["plans", "plans"]
    assert all(torch.equal(some[key], state[key]) for key in some)
    assert all(torch.equal(part.boxes[0, 512], state[key][:, 512:]) for key, part in columns.items())


def test_a_load_after_one_that_failed_in_between_reads_anew(tmp_path: Path, begun: list[str]) -> None:
    state = saved(tmp_path / "saved")
    reader = DataStatesStorageReader(tmp_path / "saved")

    class Refusing(DefaultLoadPlanner):
        def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
            raise RuntimeError(f"no agreement about {len(global_plan)} plans")

    with pytest.raises(CheckpointException, match="no agreement"):
        dcp.load({key: torch.zeros_like(v) for key, v in state.items()}, storage_reader=reader, planner=Refusing())
    other = {key: value + 10 for key, value in state.items()}
    save_with("ours", dict(other), tmp_path / "other")
    into = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(into, checkpoint_id=tmp_path / "other", storage_reader=reader)
    assert all(torch.equal(into[key], value) for key, value in other.items())
    assert begun == ["__0_0.distcp", "__0_0.distcp", "plans"]


def test_damage_in_what_was_read_ahead_is_found(tmp_path: Path, begun: list[str]) -> None:
    state = saved(tmp_path / "saved")
    file = tmp_path / "saved" / "__0_0.distcp"
    source = open_container(file)
    row = source.index.shards.row(2)
    with file.open("r+b") as opened:
        opened.seek(int(source.data_offset[row.record]) + 100)
        byte = opened.read(1)
        opened.seek(-1, 1)
        opened.write(bytes([byte[0] ^ 1]))
    into = {key: torch.zeros_like(value) for key, value in state.items()}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(into, storage_reader=DataStatesStorageReader(tmp_path / "saved"))
    (error,) = (failure[0] for failure in caught.value.failures.values())
    assert isinstance(error, CorruptError)
    assert row.key in str(error)
    assert begun == ["__0_0.distcp", "plans"]
