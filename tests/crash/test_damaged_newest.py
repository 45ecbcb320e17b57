"""When the newest checkpoint is damaged, the error names a whole one, and a restore takes that one if told to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import short
from steps import OPTIONS, array_of, providers

import datastates as ds
from datastates.commit import manifest
from datastates.container.file import open_container
from datastates.errors import DatastatesError, FormatError, RestoreError
from datastates.providers import HostTensorProvider

CONTAINER = "rank-00000.pt"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Saved in this order: steps 80, 100, 85."""
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        for step in (80, 100, 85):
            ckpt.snapshot(providers(step), step=step).wait_committed()
    return tmp_path


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 32
    file.write_bytes(data)


def flip_data(path: Path) -> None:
    flip(path / CONTAINER, int(open_container(path / CONTAINER).data_offset[0]) + 1000)


def truncate(path: Path) -> None:
    data = (path / CONTAINER).read_bytes()
    (path / CONTAINER).write_bytes(data[:-1])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "manifest": lambda path: flip(path / manifest.FILE, 40),
    "empty manifest": lambda path: (path / manifest.FILE).write_bytes(b""),
    "truncated": truncate,
    "missing": lambda path: (path / CONTAINER).unlink(),
    "index": lambda path: flip(path / CONTAINER, open_container(path / CONTAINER).index_offset + 10),
    "data": flip_data,
}


@pytest.fixture(params=DAMAGES)
def damage(request: pytest.FixtureRequest) -> Callable[[Path], object]:
    return DAMAGES[request.param]


def newest(root: Path, **options: Any) -> tuple[Any, Any]:
    state = {"a": array_of(0)}
    with ds.Checkpointer(root, **OPTIONS) as ckpt:
        return ckpt.restore([HostTensorProvider("model", state)], **options), state["a"]


def test_the_error_names_the_newest_that_is_whole(root: Path, damage: Callable[[Path], object]) -> None:
    damage(root / "step-00000085")
    advice = "the newest before it that looks whole is that of step 100: take it with step=100"
    with pytest.raises(DatastatesError, match=f"step-00000085.*{advice}, or let fallback=True do it"):
        newest(root)
    with pytest.raises(DatastatesError, match=f"step-00000085.*{advice}"):
        ds.restore(providers(0), root)
    with pytest.raises(DatastatesError, match=f"step-00000085.*{advice}"):
        ds.load(root)
    assert newest(root, step=100)[0].step == 100
    assert np.array_equal(ds.load(root, step=100)["model"]["a"], array_of(100))


def test_what_looks_damaged_itself_is_not_named(root: Path, damage: Callable[[Path], object]) -> None:
    damage(root / "step-00000085")
    truncate(root / "step-00000100")
    with pytest.raises(DatastatesError, match="that of step 80: take it with step=80"):
        newest(root)
    truncate(root / "step-00000080")
    with pytest.raises(DatastatesError, match="step-00000085") as raised:
        newest(root)
    assert "looks whole" not in str(raised.value)


def test_a_fallback_takes_the_newest_that_is_whole_and_says_so(
    root: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    damage(root / "step-00000085")
    truncate(root / "step-00000100")
    with caplog.at_level(logging.WARNING, "datastates"):
        restored, array = newest(root, fallback=True)
    assert restored.step == 80
    assert list(restored.passed_over) == ["step-00000085", "step-00000100"]
    assert np.array_equal(array, array_of(80))
    assert "restored step 80, as what is newer is damaged: step-00000085: " in caplog.text


def test_a_fallback_of_what_is_whole_takes_the_newest(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    restored, array = newest(root, fallback=True)
    assert (restored.step, restored.passed_over) == (85, {})
    assert np.array_equal(array, array_of(85))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_where_all_are_damaged_a_fallback_is_an_error_that_names_them(
    root: Path, damage: Callable[[Path], object]
) -> None:
    for path in root.glob("step-*"):
        damage(path)
    with pytest.raises(FormatError, match="every checkpoint is damaged: ") as raised:
        newest(root, fallback=True)
    assert all(f"{path.name}: " in str(raised.value) for path in root.glob("step-*"))


def test_a_fallback_where_nothing_has_been_saved_restores_nothing(tmp_path: Path) -> None:
    assert newest(tmp_path, fallback=True)[0] is None


def test_what_does_not_fit_is_no_damage(root: Path) -> None:
    with ds.Checkpointer(root, **OPTIONS) as ckpt, pytest.raises(RestoreError) as raised:
        ckpt.restore([HostTensorProvider("other", {"a": array_of(0)})], fallback=True)
    assert "step-00000085" in str(raised.value)
    assert "looks whole" not in str(raised.value)


@pytest.mark.parametrize("options", [{"step": 80}, {"strict": False}], ids=str)
def test_what_does_not_go_with_a_fallback_is_refused(root: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="fallback: "):
        newest(root, fallback=True, **options)


RANKS = """
import os, sys
import numpy as np
import datastates as ds
from datastates.providers import HostTensorProvider

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
options = dict(rank=rank, world_size=size, host_cache="4MiB", block="1MiB", rank_timeout=30)

def providers(step):
    global arrays
    arrays = {"a": np.full(100_000, step, np.float64)}
    return [HostTensorProvider(f"model{rank}", arrays)]
"""


@pytest.mark.by_hand
@pytest.mark.parametrize("damaged", short.first([1, 0], rest=pytest.mark.by_hand), ids=["of rank 1", "of rank 0"])
def test_all_ranks_take_the_same(damaged: int, tmp_path: Path, ranks: Callable[..., Any]) -> None:
    save = """
with ds.Checkpointer(sys.argv[1], **options) as ckpt:
    for step in (80, 100):
        ckpt.snapshot(providers(step), step=step).wait_committed()
"""
    restore = """
with ds.Checkpointer(sys.argv[1], **options) as ckpt:
    restored = ckpt.restore(providers(0), fallback=True)
    assert restored.step == 80 and list(restored.passed_over) == ["step-00000100"], restored
    assert np.array_equal(arrays["a"], np.full(100_000, 80.0))
    assert ckpt.restore(providers(0), step=80).step == 80
"""
    ranks(2, RANKS + save, tmp_path / "run")
    file = tmp_path / "run" / "step-00000100" / f"rank-{damaged:05d}.pt"
    flip(file, int(open_container(file).data_offset[0]) + 1000)
    ranks(2, RANKS + restore, tmp_path / "run")
    file.unlink()
    ranks(2, RANKS + restore, tmp_path / "run")
