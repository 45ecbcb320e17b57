"""``step=`` selects a checkpoint of a directory in every call that reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import datastates as ds
from datastates.errors import CheckpointNotFoundError
from datastates.providers import HostTensorProvider


def saved(root: Path) -> Path:
    with ds.Checkpointer(root) as ckpt:
        for step in (10, 20):
            ckpt.snapshot([HostTensorProvider("m", {"a": np.full(5, step)})], step=step)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("run"))


def restored(path: Path, **options: Any) -> int:
    state = {"a": np.zeros(5, np.int64)}
    step = ds.restore([HostTensorProvider("m", state)], path, **options).step
    assert step == state["a"][0]
    return step


def restored_by_a_checkpointer(path: Path, **options: Any) -> int:
    state = {"a": np.zeros(5, np.int64)}
    with ds.Checkpointer(path) as ckpt:
        ckpt.restore([HostTensorProvider("m", state)], **options)
    return int(state["a"][0])


def loaded(path: Path, **options: Any) -> int:
    return int(ds.load(path, **options)["m"]["a"][0])


def opened(path: Path, **options: Any) -> int:
    with ds.open(path, **options) as checkpoint:
        return int(checkpoint["m/a"][0])


Read = Callable[..., int]
FUNCTIONS = [restored, loaded, opened]


@pytest.mark.parametrize("read", [*FUNCTIONS, restored_by_a_checkpointer])
def test_a_step_of_a_directory_is_taken(root: Path, read: Read) -> None:
    assert read(root) == 20
    assert read(root, step=10) == 10
    assert read(root, step=np.int64(20)) == 20


@pytest.mark.parametrize("read", [*FUNCTIONS, restored_by_a_checkpointer])
def test_a_step_that_is_not_there_is_an_error(root: Path, read: Read) -> None:
    with pytest.raises(CheckpointNotFoundError, match=f"no committed checkpoint of step 15 in {root}"):
        read(root, step=15)


@pytest.mark.parametrize("read", FUNCTIONS)
def test_a_single_checkpoint_of_another_step_is_an_error(root: Path, read: Read) -> None:
    path = root / "step-00000010"
    assert read(path, step=10) == 10
    with pytest.raises(CheckpointNotFoundError, match="step-00000010 is the checkpoint of step 10, not of step 20"):
        read(path, step=20)


@pytest.mark.parametrize("read", [loaded, opened])
def test_a_single_file_of_another_step_is_an_error(root: Path, read: Read) -> None:
    file = root / "step-00000010" / "rank-00000.pt"
    assert read(file, step=10) == 10
    with pytest.raises(CheckpointNotFoundError, match=r"rank-00000\.pt is of step 10, not of step 20"):
        read(file, step=20)


@pytest.mark.parametrize("read", [*FUNCTIONS, restored_by_a_checkpointer])
@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), ("10", TypeError), (True, TypeError)])
def test_what_is_no_step_is_refused(root: Path, read: Read, step: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="step: "):
        read(root, step=step)


def test_a_checkpointer_names_a_path_in_the_place_of_providers(root: Path) -> None:
    with ds.Checkpointer(root) as ckpt:
        for call in (lambda: ckpt.snapshot("ckpts", step=30), lambda: ckpt.restore(root)):
            with pytest.raises(TypeError, match="providers: got the path"):
                call()


def test_a_checkpointer_refuses_to_nest_checkpoints(root: Path) -> None:
    path = root / "step-00000010"
    before = sorted(path.iterdir())
    with pytest.raises(ValueError, match=f"directory: {path} is itself a checkpoint"):
        ds.Checkpointer(path)
    assert sorted(path.iterdir()) == before


@pytest.mark.parametrize("read", [loaded, opened])
def test_a_missing_container_says_what_that_means(tmp_path: Path, read: Read) -> None:
    path = saved(tmp_path) / "step-00000020"
    (path / "rank-00000.pt").unlink()
    with pytest.raises(
        OSError, match=r"step-00000020 is damaged: rank-00000\.pt, the container of rank 0 of 1, is missing"
    ):
        read(path)
    with pytest.raises(OSError, match="the newest before it that looks whole is that of step 10: take it with step=10"):
        loaded(tmp_path)


def test_a_restore_from_one_rank_s_file_names_what_it_wants(root: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"rank-00000\.pt is a file, .*give the directory"):
        restored(root / "step-00000010" / "rank-00000.pt")
