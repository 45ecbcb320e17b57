"""``datastates verify --all``: each checkpoint of a directory is verified, and what several share is read once."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from command import run, run_json

import datastates as ds
from datastates.container import every_byte
from datastates.container.file import Container
from datastates.errors import StorageError
from datastates.storage import register, stores

saves = pytest.importorskip("whole_saves")
memory_store = pytest.importorskip("memory_store")


@pytest.fixture(params=["linked", "in a store"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place with five checkpoints, of which the last four have one kept container."""
    monkeypatch.setattr("datastates.commit.trial.shares_ranges", lambda folder: False)
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("mem", memory_store.MemoryStore())
    place = str(tmp_path) if request.param == "linked" else "mem://bucket/run"
    state = saves.a_state()
    with ds.Checkpointer(place, incremental=True) as checkpointer:
        for step in range(5):
            state["large.2"] += 1
            saves.save(checkpointer, state, step)
    return place


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the containers that were read."""
    names: list[str] = []
    every = every_byte.read

    def watched(source: Container, wrong: every_byte.Wrong) -> object:
        names.append(source.path.name)
        return every(source, wrong)

    monkeypatch.setattr(every_byte, "read", watched)
    return names


def test_what_is_shared_is_read_once(root: str, read: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run_json(capsys, "verify", root, "--all")
    assert (status, found["ok"]) == (0, True)
    assert [one["step"] for one in found["checkpoints"]] == [4, 3, 2, 1, 0]
    assert read.count("rank-00000.kept.pt") == 1
    assert len(read) == 6
    lines = run(capsys, "verify", root, "--all")[1].splitlines()
    assert [line.endswith("every byte is as written") for line in lines] == [True] * 5
    assert run(capsys, "verify", root, "--all", "--step", "3")[0] == 2


def test_each_checkpoint_that_has_damage_is_named(
    tmp_path: Path, linking: None, capsys: pytest.CaptureFixture[str]
) -> None:
    _, kept = saves.kept_at_step_2(tmp_path)
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    with kept.open("r+b") as file:  # the one file of two checkpoints
        file.write(data)
    status, found = run_json(capsys, "verify", tmp_path, "--all")
    assert (status, found["ok"]) == (1, False)
    assert [one["ok"] for one in found["checkpoints"]] == [False, False, True]
    (tmp_path / "step-00000001" / "manifest.json").write_bytes(b"{}")
    status, output = run(capsys, "verify", tmp_path, "--all")
    assert status == 1
    assert "step-00000000: step 0" in output


def test_one_that_cannot_be_read_does_not_end_it(
    tmp_path: Path, linking: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saves.kept_at_step_2(tmp_path)
    every = every_byte.read

    def denied(source: Container, wrong: every_byte.Wrong) -> object:
        if source.path.parent.name == "step-00000001":
            raise StorageError(errno.EACCES, "read", str(source.path))
        return every(source, wrong)

    monkeypatch.setattr(every_byte, "read", denied)
    status, found = run_json(capsys, "verify", tmp_path, "--all")
    assert status == 1
    assert [one["ok"] for one in found["checkpoints"]] == [True, False, True]
    assert "Permission denied" in found["checkpoints"][1]["problems"][0]["problem"]


@pytest.mark.parametrize("what", ["none", "one"])
def test_it_wants_a_directory_of_checkpoints(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "one" if what == "one" else tmp_path
    ds.snapshot([], tmp_path / "one").wait_committed()
    if what == "none":
        shutil.rmtree(tmp_path / "one")
    assert run(capsys, "verify", place, "--all")[0] == 2
