"""``datastates drain`` and ``fetch`` bring checkpoints from one place to another, and say what is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
from far_store import FarStore

import datastates as ds
from datastates.cli.commands import main
from datastates.providers import from_state_dict
from datastates.storage import register, stores

STEPS = (1, 2, 3)


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Run: TypeAlias = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    def call(*arguments: object) -> Done:
        return Done(main([str(a) for a in arguments]), *capsys.readouterr())

    return call


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with ds.Checkpointer(tmp_path / "run") as checkpointer:
        for step in STEPS:
            checkpointer.snapshot([from_state_dict("m", {"w": torch.full((9,), float(step))})], step=step)
    return tmp_path / "run"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def harm(place: Path, step: int, file: str = "rank-00000.pt") -> None:
    path = place / f"step-{step:08d}" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def test_drain_brings_all_and_then_nothing(run: Run, place: Path, tmp_path: Path) -> None:
    found = json.loads(run("drain", place, tmp_path / "other", "--json").stdout)
    assert [Path(one["source"]).name for one in found["checkpoints"]] == [f"step-0000000{n}" for n in (3, 2, 1)]
    assert names(tmp_path / "other") == [f"step-0000000{step}" for step in STEPS]
    assert "has them all" in run("drain", place, tmp_path / "other").stdout
    for step in STEPS:
        name = f"step-{step:08d}/rank-00000.pt"
        fetched, saved = (torch.load(folder / name) for folder in (tmp_path / "other", place))
        assert torch.equal(fetched["m"]["w"], saved["m"]["w"])


def test_fetch_brings_the_newest_or_a_step(run: Run, place: Path, tmp_path: Path) -> None:
    assert run("fetch", place, tmp_path / "other").returncode == 0
    assert names(tmp_path / "other") == ["step-00000003"]
    assert run("fetch", place, tmp_path / "other", "--step", "1").returncode == 0
    assert run("fetch", place / "step-00000002", tmp_path / "other").returncode == 0
    assert names(tmp_path / "other") == [f"step-0000000{step}" for step in STEPS]


@pytest.mark.parametrize("file", ["rank-00000.pt", "manifest.json"])
def test_a_damaged_one_stays_and_the_others_are_brought(run: Run, place: Path, tmp_path: Path, file: str) -> None:
    harm(place, 2, file)
    done = run("drain", place, tmp_path / "other")
    assert done.returncode == 1
    assert f"step-00000002/{file}" in done.stderr
    assert names(tmp_path / "other") == ["step-00000001", "step-00000003"]


def test_fetch_names_an_older_checkpoint_where_the_newest_is_damaged(run: Run, place: Path, tmp_path: Path) -> None:
    harm(place, 3)
    done = run("fetch", place, tmp_path / "other")
    assert (done.returncode, names(tmp_path / "other")) == (1, [])
    assert "that of step 2: take it with --step 2" in done.stderr


def test_wrong_calls(run: Run, place: Path, tmp_path: Path) -> None:
    for arguments in (
        ("drain", tmp_path / "nothing", tmp_path / "other"),
        ("fetch", place, tmp_path / "other", "--step", "7"),
        ("fetch", place, place / "step-00000001"),
    ):
        done = run(*arguments)
        assert done.returncode == 2, done.stderr
    assert not (tmp_path / "other").exists()


def test_a_target_that_fails_is_not_taken_for_damage(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first failure ends it."""
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("far", store := FarStore())

    def fail(request: str, path: object) -> None:
        store.dead = request == "upload"

    store.before = fail
    assert main(["drain", str(place), "far://bucket/run"]) == 1
    assert capsys.readouterr().err.count("the server does not answer") == 1
    assert len(store.requests("upload")) == 1
    assert np.all(ds.load(place)["m"]["w"].numpy() == 3)
